"""Expert parallelism on CPU engines, which vLLM does not have: docs/expert_parallel_engines.md."""
