"""Examples: the demonstration model."""
