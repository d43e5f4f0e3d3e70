"""Figures and tables of papers, reproduced in simulation."""
