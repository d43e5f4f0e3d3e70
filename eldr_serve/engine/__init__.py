"""The interface of engines (`protocol`) and of kinds of engines (`backend_protocol`), and what implements it.

`vllm` implements both with vLLM, and `fake` implements the first without computation, for tests.
"""
