"""Batches of one domain activate fewer experts than mixed ones (counterpart of the paper's Figure 4).

    python -m benchmarks.same_domain --prompts DIR

Batches are drawn at random, each request at a random decode step of its real routes. A domain counts
as often as it occurs; domains with too few requests for a batch are left out of that batch size.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import options
from benchmarks.harness.capture import captured
from offline.simulation.requests import expert_bits
from tools.cli import run
from tools.plots import lines
from tools.results import publish

SIZES = (4, 8, 16, 32, 64, 128)


def same_domain(
    prompts: options.Prompts = options.PROMPTS,
    draws: Annotated[int, typer.Option(min=10, help="Batches drawn for each size and kind.")] = 1000,
    requests: options.Captured = 2400,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Count active experts of same-domain and of mixed batches."""
    data = captured(prompts, work, requests=requests, seed=seed)
    num_layers, num_experts = data.trace.prefill_counts.shape[1:]
    rng = np.random.default_rng(seed)
    domains = np.array(data.trace.domains)
    rows: list[dict[str, Any]] = []
    for workload in ("task", "language"):
        members = data.group(workload)
        bits = {int(i): expert_bits(data.routes(int(i)), num_experts) for i in members}

        def active(batch: Any, bits: dict[int, Any] = bits) -> float:
            steps = [bits[int(i)][rng.integers(len(bits[int(i)]))] for i in batch]
            return float(np.bitwise_count(np.bitwise_or.reduce(steps)).sum() / num_layers)

        names, sizes = np.unique(domains[members], return_counts=True)
        for size in SIZES:
            large = sizes >= 2 * size
            if not large.any():
                continue
            weights = sizes[large] / sizes[large].sum()
            pool = members[np.isin(domains[members], names[large])]
            by_domain = {name: members[domains[members] == name] for name in names[large]}
            same = [
                active(rng.choice(by_domain[rng.choice(names[large], p=weights)], size, replace=False))
                for _ in range(draws)
            ]
            mixed = [active(rng.choice(pool, size, replace=False)) for _ in range(draws)]
            rows.append(
                {
                    "workload": workload,
                    "batch_size": size,
                    "domains": int(large.sum()),
                    "same_domain": float(np.mean(same)),
                    "mixed": float(np.mean(mixed)),
                    "change_pct": 100 * float(np.mean(same) / np.mean(mixed) - 1),
                }
            )
    path = publish(
        "same_domain", rows, inputs={"captured": requests, "draws": draws}, seed=seed, out=out,
        notes="mean distinct experts of a MoE layer in one decode step",
    )  # fmt: skip
    lines(rows, "batch_size", ["same_domain", "mixed"], path.with_suffix(".png"))


if __name__ == "__main__":
    run(same_domain)
