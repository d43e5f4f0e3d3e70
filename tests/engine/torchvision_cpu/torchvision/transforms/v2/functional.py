"""Functions on pictures, none of which is here."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
