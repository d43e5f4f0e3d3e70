"""Empty module for functions on images."""

from .. import InterpolationMode

__all__ = ["InterpolationMode"]
