"""A name that transformers imports, and uses for pictures alone."""

pil_to_tensor = None
