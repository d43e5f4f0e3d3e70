"""Stands in for torchvision where no build of it fits PyTorch's for CPUs; text needs nothing of it but names.

vLLM imports its part for Qwen3.5's pictures with a text model too.
"""

__version__ = "0.0"
