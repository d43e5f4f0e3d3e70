"""What several benchmarks share: a local Ray, real and fake engines, an HTTP client that times streams."""
