"""Measurements of each process, supervision of its background work, and export of its metrics."""
