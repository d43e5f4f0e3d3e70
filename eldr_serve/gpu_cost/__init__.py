"""Cost of a model's decode step on a GPU, from kernel times that NVIDIA measured."""
