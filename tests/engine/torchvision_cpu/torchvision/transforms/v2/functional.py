"""Empty module for functions on images."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
