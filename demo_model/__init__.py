"""The demonstration model: a small trained mixture-of-experts language model, and the scripts that made it."""
