"""Compare the memory of the expert-count cache with that of the KV cache, for each deployment.

    python -m benchmarks.engine.cache_memory

A row of the expert-count cache takes one byte per MoE layer and expert (two if blocks exceed 255 tokens),
while a KV block grows with its size, so the share falls as 1 / block_size. `share_of_kv_pct` should be below
0.5. Under tensor parallelism a rank holds its part of the KV heads, but a whole row of counts. A model with
sliding windows has several groups of layers. A block belongs to one group at a time, and has the size of the
largest group.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.lib import options
from eldr_serve.commands.run import run
from eldr_serve.engine.vllm.capture.block_counts import BlockExpertCounts, cell_dtype
from eldr_serve.engine.vllm.config import engine_kwargs
from eldr_serve.errors import UserInputError
from loadgen.results import publish

BENCHMARKS = {"cache_memory": "default"}
GOAL_PCT = 0.5
_GPU_BLOCK_SIZES = [16, 32, 64, 128]  # tokens, where the deployment names none
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a model. `kv_groups`: (layers, KV heads, head dimension) of vLLM's groups."""

    moe_layers: int
    experts: int
    kv_groups: tuple[tuple[int, int, int], ...]

    def kv_elements(self, ranks: int) -> int:
        """Return the KV elements per token of a block, on one of `ranks` tensor-parallel ranks."""
        return max(2 * layers * math.ceil(heads / ranks) * dim for layers, heads, dim in self.kv_groups)


# Shapes from the config.json of each model. For a model in a folder, `shape_of` reads the file itself.
SHAPES = {
    "Qwen/Qwen3-30B-A3B": CacheShape(48, 128, ((48, 4, 128),)),
    "Qwen/Qwen3-235B-A22B": CacheShape(94, 128, ((94, 4, 128),)),
    "openai/gpt-oss-120b": CacheShape(36, 128, ((18, 8, 64),) * 2),  # sliding and full attention
    "./out/demo_model_4_heads": CacheShape(6, 64, ((6, 1, 64),)),
    "deepseek-ai/DeepSeek-V3": CacheShape(58, 256, ((61, 1, 288),)),  # MLA: 576 elements a layer
    "google/gemma-4-26B-A4B-it": CacheShape(30, 128, (*((5, 8, 256),) * 5, (5, 2, 512))),  # sliding; global
}


def shape_of(source: str) -> CacheShape:
    """Return the shape of a model by its folder or its id. Raise UserInputError if neither is known."""
    if source in SHAPES:
        return SHAPES[source]
    path = Path(source) / "config.json"
    if not path.exists():
        raise UserInputError(f"the shape of model {source!r} is not known, and it is not a folder")
    config = json.loads(path.read_text())
    layers, heads, dim = (config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    moe_layers = layers - len(config.get("mlp_only_layers") or [])
    return CacheShape(
        moe_layers,
        config["num_experts" if "num_experts" in config else "num_local_experts"],
        ((layers, heads, dim),),
    )


def compare(
    shape: CacheShape, *, block_size: int, dtype_bytes: int, ranks: int, kv_gib: float
) -> dict[str, Any]:
    """Return a row on both caches of a rank with `kv_gib` GiB of KV cache. The expert-count cache is real."""
    block_bytes = shape.kv_elements(ranks) * dtype_bytes * block_size
    num_blocks = max(1, int(kv_gib * 2**30 / block_bytes))
    cache = BlockExpertCounts(num_blocks, block_size, shape.moe_layers, shape.experts)
    kv_bytes = num_blocks * block_bytes
    return {
        "blocks": num_blocks,
        "kv_block_bytes": block_bytes,
        "row_bytes": cache.nbytes // num_blocks,
        "kv_cache_mib": kv_bytes / 2**20,
        "expert_count_cache_mib": cache.nbytes / 2**20,
        "share_of_kv_pct": 100 * cache.nbytes / kv_bytes,
    }


def smallest_block_size(shape: CacheShape, dtype_bytes: int, ranks: int) -> int:
    """Return the smallest block size (tokens) that meets the goal."""
    cells, kv_bytes = shape.moe_layers * shape.experts, shape.kv_elements(ranks) * dtype_bytes
    sizes = {width: math.ceil(100 * width * cells / (GOAL_PCT * kv_bytes)) for width in (1, 2, 4)}
    return next(size for width, size in sizes.items() if cell_dtype(size).itemsize == width)


def cache_memory(
    deployments: Annotated[Path, typer.Option(help="Folder of deployment YAMLs.")] = Path("deployments"),
    kv_gib: Annotated[float, typer.Option(min=0.01, help="KV cache of one GPU rank, GiB.")] = 8.0,
    out: options.Out = None,
) -> None:
    """Compare both caches' bytes for the prefill engines of every deployment."""
    rows = []
    cpu_block = int(engine_kwargs("prefill", device="cpu")["block_size"])
    for path in sorted(deployments.glob("*.yaml")):
        arguments = yaml.safe_load(path.read_text())["applications"][0]["args"]
        # Whole replicas have no prefill_config.
        config = arguments.get("prefill_config") or arguments["decode_config"]
        engine = config["engine_kwargs"]
        on_cpu = (config.get("accelerator_config") or {}).get("kind") == "cpu"
        sizes = [cpu_block] if on_cpu else _GPU_BLOCK_SIZES
        shape = shape_of(config["model_loading_config"]["model_source"])
        ranks, dtype_bytes = int(engine.get("tensor_parallel_size", 1)), _DTYPE_BYTES[engine["dtype"]]
        variables = config.get("runtime_env", {}).get("env_vars", {}) if on_cpu else {}
        gib = float(variables.get("VLLM_CPU_KVCACHE_SPACE", kv_gib))
        for size in [int(engine["block_size"])] if "block_size" in engine else sizes:
            row: dict[str, Any] = {"deployment": path.stem, "ranks": ranks, "block_size_tokens": size}
            row |= compare(shape, block_size=size, dtype_bytes=dtype_bytes, ranks=ranks, kv_gib=gib)
            smallest = smallest_block_size(shape, dtype_bytes, ranks)
            met = row["share_of_kv_pct"] < GOAL_PCT
            rows.append(row | {"goal_met": met, "smallest_block_size_tokens": smallest})
    if not rows:
        raise UserInputError(f"no deployment YAML in {deployments}")
    publish(
        "cache_memory",
        rows,
        inputs={"kv_gib": kv_gib, "goal_pct": GOAL_PCT},
        seed=0,
        notes="one rank of a prefill engine; decode engines have no expert-count cache",
        out=out,
    )


if __name__ == "__main__":
    run(cache_memory)
