"""Version 2 of the transforms."""
