"""Placement policies and their registry."""
