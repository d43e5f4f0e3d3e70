"""Expert parallelism for CPU engines, which vLLM lacks: see docs/expert_parallel_engines.md.

Everything runs in vLLM's workers, except `swap`, which runs beside the engine's client.
"""
