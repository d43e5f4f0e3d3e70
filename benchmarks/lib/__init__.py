"""Shared parts of the benchmarks: a local Ray, real and fake engines, an HTTP client that times streams."""
