"""Estimate of how long the decode steps of a comparison would take for a real model on an H100 GPU."""

from __future__ import annotations

from typing import Any

from eldr_serve.data_root import ROOT
from eldr_serve.scheduling.cost_file import FittedCost

COST = ROOT / "examples/costs/qwen3_30b_a3b_h100.json"
LAYERS, EXPERTS = 48, 128  # Qwen3-30B-A3B, whose tokens use a 16th of the experts, as the demo model's do
CONTEXT = 1024  # KV tokens of each request


def add_gpu_steps(rows: list[dict[str, Any]], experts: int) -> list[str]:
    """Add the steps of Qwen3-30B-A3B on an H100 to the rows, and return a sentence about them, if any.

    A step has the measured batch and the measured share of active experts. As batches differ between
    policies, the change is that of the time per token, which has no interval.

    Args:
        rows: rows of loadgen.figures. Those of policies without steps stay as they are.
        experts: experts of a layer of the model that ran.
    """
    cost = FittedCost.load(COST).cost
    stepped = {row["policy"]: row for row in rows if row["batch_size"] is not None}
    for row in stepped.values():
        batch, active = row["batch_size"], row["active_experts"] * LAYERS * EXPERTS / experts
        row["h100_step_ms"] = 1e3 * float(cost.seconds(batch, batch * CONTEXT, active))
        row["h100_ms_per_token"] = row["h100_step_ms"] / batch
    clauses = []
    for policy, row in stepped.items():
        clauses.append(f"{row['h100_step_ms']:.1f} ms under {policy}")
        if (base := row.get("active_experts_baseline")) is not None:
            change = 100 * (row["h100_ms_per_token"] / stepped[base]["h100_ms_per_token"] - 1)
            row |= dict.fromkeys(f"h100_ms_per_token_change_pct{end}" for end in ("_low", "_high"))
            row["h100_ms_per_token_change_pct"] = change
            clauses[-1] += f" ({change:+.1f} % per token)"
    if not clauses:
        return []
    return [
        "Calculated, not run: with the layers of Qwen3-30B-A3B on an H100, and kernel times that NVIDIA "
        f"measured, a step of this batch, this share of each layer's experts and {CONTEXT:,} KV tokens for "
        f"each request would take {', '.join(clauses)}."
    ]
