"""Stand-in for torchvision, where no build fits PyTorch's for CPUs. Text models need only its names.

vLLM imports its image code for Qwen3.5 even with a text model.
"""

__version__ = "0.0"
