"""The DecodeRouter actor, its state, and RouterClient for ingresses."""
