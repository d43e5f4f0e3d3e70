"""The second version of the same."""
