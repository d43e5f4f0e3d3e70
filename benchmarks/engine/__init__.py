"""Benchmarks of engines and of their extension."""
