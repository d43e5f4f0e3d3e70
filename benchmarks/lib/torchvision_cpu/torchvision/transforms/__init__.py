"""Names that transformers reads at import."""

from enum import Enum


class InterpolationMode(Enum):
    """Interpolation mode for resizing an image."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
