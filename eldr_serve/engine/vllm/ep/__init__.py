"""Expert parallelism for CPU engines, which vLLM lacks: see docs/expert_parallel_engines.md."""
