"""The DecodeRouter actor, its state and its client."""
