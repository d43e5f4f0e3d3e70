"""Benchmarks of the application and of its parts, on Ray Serve."""
