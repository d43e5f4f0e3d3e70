"""Capture of the experts that tokens choose, in vLLM's workers, on the device or on the host."""
