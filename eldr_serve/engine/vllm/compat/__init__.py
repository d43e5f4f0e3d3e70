"""The internal names of vLLM and Ray Serve LLM that this package uses; no other module names them.

There is one module for each part of vLLM. Engines check at their start that these names exist
(`checked.check_names`).
"""
