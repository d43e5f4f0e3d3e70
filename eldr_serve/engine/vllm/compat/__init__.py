"""The internal names of vLLM and Ray Serve LLM that this package uses; no other module names them.

One module per part of vLLM. Engines check at their start that these names exist (`checked.check_names`).
"""
