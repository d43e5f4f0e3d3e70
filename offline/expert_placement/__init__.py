"""The methods of `offline.place`: which rank of an expert-parallel engine holds which expert."""
