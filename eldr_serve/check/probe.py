"""The process that asks vLLM: engines in (JSON on stdin), answers out (JSON, the last line of stdout)."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eldr_serve.check.machine import GIB
from eldr_serve.check.memory import Step, kv_bytes, reserve_bytes
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.described import DescribedEngine

# By table, vLLM 0.32.0: tokens a KV block on CUDA where nobody says; its CPU platform has others.
_GPU_BLOCK = 16


def answer(
    config: str, arguments: dict[str, Any], memory_gib: float, capability: tuple[int, int] | None
) -> dict[str, Any]:
    """See eldr_serve.check.engines.Answer."""
    found: dict[str, Any] = {}
    if capability is not None:
        arguments = {"block_size": _GPU_BLOCK} | _batch(memory_gib, capability) | arguments
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        try:
            engine = DescribedEngine(arguments | {"model": folder}, capability)
            found["max_model_len"] = engine.config.model_config.max_model_len
            found["weights"] = engine.weight_bytes()
            found["kernels"] = sorted(engine.kernels())
            found["reserve"] = reserve_bytes(_step(engine), "cpu" if capability is None else "gpu")
            if capability is None:
                found["kv"] = int(memory_gib * GIB)
            else:
                utilization = engine.config.cache_config.gpu_memory_utilization
                found["kv"] = kv_bytes(memory_gib, utilization, found["weights"], found["reserve"])
            engine.check()
            with suppress(ValueError):  # no room for one sequence: none is counted
                found["kv_tokens"], found["sequences"] = engine.kv_cache(found["kv"])
        except ValidationError as error:
            found["refusal"] = " ".join(str(error.errors()[0]["msg"]).split()).removeprefix("Value error, ")
        except (ValueError, NotImplementedError, AssertionError, UnsupportedEngineError) as error:
            found["refusal"] = " ".join(str(error).split())
    return found


def _batch(memory_gib: float, capability: tuple[int, int]) -> dict[str, int]:
    """By table, vLLM 0.32.0: a step's tokens and sequences where nobody says, by the GPU's memory."""
    if memory_gib >= 160:
        return {"max_num_batched_tokens": 16384, "max_num_seqs": 1024}
    if memory_gib >= 70 and capability != (8, 0):
        return {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
    return {"max_num_batched_tokens": 2048, "max_num_seqs": 256}


def _step(engine: DescribedEngine) -> Step:
    model, scheduler = engine.config.model_config, engine.config.scheduler_config
    text = model.hf_text_config
    ranks = (
        1
        if engine.config.parallel_config.enable_expert_parallel
        else engine.config.parallel_config.tensor_parallel_size
    )
    return Step(
        tokens=scheduler.max_num_batched_tokens,
        sequences=scheduler.max_num_seqs,
        hidden=model.get_hidden_size(),
        top_k=next(
            (
                int(value)
                for name in ("num_experts_per_tok", "top_k_experts")
                if (value := getattr(text, name, None))
            ),
            1,
        ),
        expert_width=getattr(text, "moe_intermediate_size", text.intermediate_size) // ranks,
        vocabulary=model.get_vocab_size(),
        element=model.dtype.itemsize,
    )


if __name__ == "__main__":
    print(json.dumps([answer(**engine) for engine in json.load(sys.stdin)]))
