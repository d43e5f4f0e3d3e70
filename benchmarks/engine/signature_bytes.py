"""Measure the size of a prompt's expert counts on the wire, in `kv_transfer_params`.

    python -m benchmarks.engine.signature_bytes --gptoss RECORDS

The shape is Qwen3-30B-A3B's: 48 layers, 128 experts, 8 per token. Rows `uniform` choose experts uniformly at
random. In rows `skewed`, each prompt prefers some experts in each layer, by normal noise in the scores that
is twice as strong as the noise of single tokens. Rows `GPT-OSS-20B` use its published routes. They put eight
prompts' counts [24, 32] side by side, which gives 16 of 128 experts per token. `packed_p50_bytes` is the size
of the text, and `cells_bytes` is the size of the counts before compression.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.synthetic import EXPERTS, LAYERS, TOP_K
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.experts.signature import pack_counts
from loadgen.results import publish
from offline.route_files import read_trace_of_routes

BENCHMARKS = {"signature_bytes": "default"}
_LENGTHS = (64, 512, 2048)  # tokens of a prompt; records of GPT-OSS-20B have enough steps only for 64
_TILES = 8  # prompts of GPT-OSS-20B side by side: 2 x 24 layers, 4 x 32 experts


def draw_counts(tokens: int, preference_scale: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return int64[L,E] of a prompt whose scores are noise plus `preference_scale` times its preferences."""
    noise, preferences = rng.gumbel(size=(LAYERS, tokens, EXPERTS)), rng.normal(size=(LAYERS, 1, EXPERTS))
    scores = noise + preference_scale * preferences
    chosen = np.argpartition(-scores, TOP_K, axis=-1)[..., :TOP_K]
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    np.add.at(counts, (np.arange(LAYERS)[:, None, None], chosen), 1)
    return counts


def summary_row(routing: str, tokens: int, prompts: list[NDArray[Any]]) -> dict[str, Any]:
    """Return a table row from each prompt's counts."""
    packed = np.array([len(pack_counts(counts)) for counts in prompts])
    used = np.mean([(counts > 0).mean() for counts in prompts])
    cells_bytes = max(counts.size * (1 if counts.max() < 256 else 2) for counts in prompts)
    row: dict[str, Any] = {"routing": routing, "prompt_tokens": tokens, "prompts": len(prompts)}
    row |= {"cells_used_pct": float(100 * used), "cells_bytes": cells_bytes}
    return row | {"packed_p50_bytes": float(np.median(packed)), "packed_max_bytes": int(packed.max())}


def tile_counts(
    file: Path, counts: NDArray[Any], prompts: int, rng: np.random.Generator
) -> list[NDArray[Any]]:
    """Put counts of GPT-OSS-20B [N,24,32] side by side, drawn at random; return at most `prompts` of [L,E].

    Raises:
        UserInputError: the file has too few records for one [L,E].
    """
    groups = min(prompts, len(counts) // _TILES)
    if not groups:
        raise UserInputError(
            f"--gptoss {file} has {len(counts)} records of more than {_LENGTHS[0]} tokens: name a file "
            f"with at least {_TILES}"
        )
    drawn = counts[rng.permutation(len(counts))[: groups * _TILES]]
    tiles = drawn.reshape(groups, 2, 4, *counts.shape[1:]).transpose(0, 1, 3, 2, 4)
    return list(tiles.reshape(groups, LAYERS, EXPERTS))


def signature_bytes(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind and length.")] = 20,
    gptoss: Annotated[
        Path | None, typer.Option(exists=True, help="GPT-OSS-20B records, JSON lines; default: not measured.")
    ] = None,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Measure the packed counts of prompts by length and kind of routing."""
    rng = np.random.default_rng(seed)
    rows = [
        summary_row(name, tokens, [draw_counts(tokens, preference_scale, rng) for _ in range(prompts)])
        for tokens in _LENGTHS
        for name, preference_scale in (("uniform", 0.0), ("skewed", 2.0))
    ]
    if gptoss is not None:
        cut = {"prompt_tokens": _LENGTHS[0], "output_tokens": 1, "min_output_tokens": 1}
        counts = read_trace_of_routes(gptoss, "gpt-oss-20b", **cut).prefill_counts
        rows.append(summary_row("GPT-OSS-20B", _LENGTHS[0], tile_counts(gptoss, counts, prompts, rng)))
    publish(
        "signature_bytes",
        rows,
        inputs={"gptoss": gptoss and gptoss.name},
        seed=seed,
        out=out,
        notes="base64 text of zlib's fastest level",
    )


if __name__ == "__main__":
    run(signature_bytes)
