"""Synthetic data of Qwen3-30B-A3B's shape: a config without weights, expert counts, tables of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.experts.signature import SignatureSpec

LAYERS, EXPERTS, TOP_K = 48, 128, 8
VOCABULARY, HIDDEN, INTERMEDIATE = 151_936, 2048, 768
KV_BYTES = 2 * 4 * 128 * 2  # bytes of a token in a layer: keys and values of 4 heads of 128, bf16
# Arguments of an engine with vLLM's dummy weights, whose prompts are token ids.
DUMMY = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
_PROMPT_TOKENS = 300


def prompt_counts(number: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """Return uint32[number, L, E] counts of prompts, each with its own expert preferences."""
    weights = (rng.dirichlet(np.full(EXPERTS, 0.1)) for _ in range(number))
    pairs = _PROMPT_TOKENS * TOP_K
    return np.stack([rng.multinomial(pairs, w, size=LAYERS).astype(np.uint32) for w in weights])


def write_config(folder: Path, *, layers: int, vocabulary: int, hidden: int, intermediate: int) -> Path:
    """Write the model's config without weights, changed only by the arguments, and return the folder."""
    from transformers import Qwen3MoeConfig

    head: dict[str, Any] = {"head_dim": 128}  # transformers does not declare this parameter
    Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        **head,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        moe_intermediate_size=intermediate,
        architectures=["Qwen3MoeForCausalLM"],
        max_position_embeddings=4096,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


def random_spec(rng: np.random.Generator) -> SignatureSpec:
    """Return a spec with random expert weights and all layers."""
    return SignatureSpec(rng.uniform(0.1, 2, (LAYERS, EXPERTS)).astype(np.float32), np.arange(LAYERS))


def table_near(
    prompts: NDArray[np.uint32],
    workers: int,
    rng: np.random.Generator,
    *,
    spec: SignatureSpec,
    noise: int = 3,
) -> RoutingTable:
    """Return a table whose centroids are these prompts in turn, each count raised by less than `noise`."""
    near = prompts[np.arange(workers) % len(prompts)]
    near = near + rng.integers(0, noise, (workers, LAYERS, EXPERTS), dtype=np.uint32)
    return RoutingTable("m", spec, spec.encode(near), np.ones(workers, np.int64), [""] * workers)
