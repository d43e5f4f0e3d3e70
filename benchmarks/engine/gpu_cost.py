"""Fit step costs of models on GPUs to NVIDIA's measured kernel times, and show the fits' errors.

    python -m benchmarks.engine.gpu_cost

It needs no GPU, but the package `aiconfigurator-core`. Each model on a GPU gets one step cost, for batches of
1 to 64 requests with 512 to 8,192 KV tokens each. The terms of experts and KV tokens are fitted to steps with
even and with skewed routing. The other terms depend on the batch, and are fitted to the package's own steps,
which all have skewed routing.
`error_pct_N` is the fit's error with skewed routing at N requests of 1,024 KV tokens.
`error_max_of_8_to_32_pct` is the largest error, with both kinds of routing, of a fit only to batches of 8, 16
and 32. It is empty if these batches do not separate the cost of experts from the other terms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.lib import options
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost import kernel_times
from eldr_serve.gpu_cost.expected import CONTEXT_TOKENS, expected_steps
from eldr_serve.gpu_cost.fitting import fit
from eldr_serve.gpu_cost.readings import Readings, Setting
from loadgen.results import publish

BENCHMARKS = {"gpu_cost": "named"}
_MODELS = (
    ("Qwen/Qwen3-30B-A3B", 1, 1),
    ("openai/gpt-oss-20b", 1, 1),
    ("openai/gpt-oss-120b", 1, 1),
    ("Qwen/Qwen3-235B-A22B-FP8", 4, 4),
    ("mistralai/Mixtral-8x7B-v0.1", 2, 1),
    ("deepseek-ai/DeepSeek-V3", 8, 8),
)
SETTINGS = tuple(Setting(m, gpu, tp, ep) for gpu in ("h100_sxm", "h200_sxm") for m, tp, ep in _MODELS)


def row_of(readings: Readings) -> dict[str, Any]:
    """Return the row of a model on a GPU: terms of its cost, errors, and what placement could save."""
    fitted = fit(readings)
    summary, setting = fitted.summary(), readings.setting
    row = {"model": setting.model, "gpu": setting.gpu, "tp": setting.tp, "ep": setting.ep}
    row |= {name: summary[name] for name in summary if not name.startswith("error_")}
    row |= {f"{name}_pct": 100 * summary[name] for name in summary if name.startswith("error_")}
    row["error_max_of_8_to_32_pct"] = _error_of_a_range(readings, 8, 32)
    own = [
        (step, 100 * float(error))
        for step, error in zip(readings.steps, fitted.errors, strict=True)
        if step.routing == "skewed" and step.context == CONTEXT_TOKENS
    ]
    row |= {f"step_ms_{step.requests}": 1e3 * step.seconds for step, _ in own}
    row |= {f"error_pct_{step.requests}": error for step, error in own}
    for step in expected_steps(fitted.cost, readings.shape):
        row[f"experts_share_pct_{step.requests}"] = 100 * step.experts_share
        row[f"most_saved_pct_{step.requests}"] = 100 * step.most_saved
    return row


def _error_of_a_range(readings: Readings, fewest: int, most: int) -> float | None:
    steps = tuple(step for step in readings.steps if fewest <= step.requests <= most)
    try:
        return 100 * float(np.abs(fit(replace(readings, steps=steps)).errors).max())
    except UserInputError:
        return None


def gpu_cost(seed: options.Seed = 0, out: options.Out = None) -> None:
    """Fit six models on H100 and H200 GPUs."""
    all_readings = [kernel_times.read(setting) for setting in SETTINGS]
    publish(
        "gpu_cost",
        [row_of(readings) for readings in all_readings],
        inputs={
            "source": all_readings[0].source,
            "batches": kernel_times.BATCHES,
            "contexts": kernel_times.CONTEXTS,
            "prompts": kernel_times.PROMPTS,
        },
        seed=seed,
        notes="fitted to kernel times that NVIDIA measured; nothing of this project ran on these GPUs",
        out=out,
    )


if __name__ == "__main__":
    run(gpu_cost)
