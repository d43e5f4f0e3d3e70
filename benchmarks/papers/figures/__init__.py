"""Figures and tables of the papers that are reproduced in simulation."""
