"""The internal names of vLLM and of Ray Serve LLM that this package leans on, and no other module names.

One module for each part of vLLM; what each needs is checked when an engine starts (`checked.check_names`).
"""
