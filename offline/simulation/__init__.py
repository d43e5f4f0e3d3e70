"""Discrete-event simulation of decode workers with the policies of production."""
