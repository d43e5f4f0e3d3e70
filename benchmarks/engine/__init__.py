"""Benchmarks of engines and of the vLLM extension."""
