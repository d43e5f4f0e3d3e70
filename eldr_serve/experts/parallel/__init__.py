"""Experts on the ranks of an expert-parallel engine: placements, moves, and the choice among replicas."""
