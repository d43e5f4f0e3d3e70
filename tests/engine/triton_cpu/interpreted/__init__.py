"""A Triton backend `cpu` in name alone, so that vLLM takes Model Runner V2 on a machine without a GPU.

vLLM's CPU build uses Triton, and with it V2, where Triton has a backend of that name. Triton finds backends
by entry points: with this folder's parent on PYTHONPATH it finds this one. Nothing is ever compiled by it:
under TRITON_INTERPRET=1 Triton runs every kernel in Python.
"""
