"""Replica choice per batch, including METRO in NumPy, PyTorch and Triton. Does not use Ray or vLLM."""
