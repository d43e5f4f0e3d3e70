"""Engines: what serving asks of one (`protocol`), vLLM's (`vllm`), and one that computes nothing (`fake`)."""
