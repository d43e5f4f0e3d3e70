"""The interfaces of running engines (`protocol`) and of kinds of engines (`backend_protocol`).

`vllm` implements both with vLLM; for tests, `fake` implements the first without any computation.
"""
