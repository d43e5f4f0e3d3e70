"""Names that transformers imports and uses only for images."""

ImageReadMode = decode_image = None
