"""The demonstration model: a small trained mixture of experts, and the scripts that made it."""
