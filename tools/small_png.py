"""Small pictures for the docs."""

from __future__ import annotations

import io

from PIL import Image

_COLOURS = 128  # of the palette; a page or a plot has few


def small_png(png: bytes, most_px: int | None = None) -> bytes:
    """Return the picture with a palette, a third as large; cropped to its upper `most_px` lines if given."""
    content = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    if most_px is not None:
        picture = picture.crop((0, 0, picture.width, min(picture.height, most_px)))
    picture.quantize(_COLOURS).save(content, "png", optimize=True)
    return content.getvalue()
