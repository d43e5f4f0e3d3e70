"""Discrete-event simulation of decode workers; the policies are production's own."""
