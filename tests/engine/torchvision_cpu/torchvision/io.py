"""Names that transformers imports, and uses for pictures alone."""

ImageReadMode = decode_image = None
