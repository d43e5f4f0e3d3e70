"""METRO: which replica of an expert serves a batch, in NumPy, PyTorch and Triton. No Ray, no vLLM."""
