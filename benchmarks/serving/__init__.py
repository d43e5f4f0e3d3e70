"""Benchmarks of the application and its parts, on Ray Serve."""
