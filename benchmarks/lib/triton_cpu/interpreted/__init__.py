"""A Triton backend named `cpu`, so that vLLM accepts Model Runner V2 on a machine without a GPU.

vLLM's CPU build uses Triton, and with it V2, if Triton has a backend of that name. Triton finds backends
by entry points: with this folder's parent on PYTHONPATH it finds this one. The backend never compiles
anything: under TRITON_INTERPRET=1 Triton runs every kernel in Python.
"""
