"""A name that transformers imports and uses only for images."""

pil_to_tensor = None
