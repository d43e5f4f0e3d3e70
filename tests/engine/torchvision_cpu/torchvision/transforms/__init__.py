"""Names that transformers reads when it is imported."""

from enum import Enum


class InterpolationMode(Enum):
    """Of a picture that is resized."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
