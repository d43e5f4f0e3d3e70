"""The turns that a METRO kernel takes one after another: the paper's threads with locks beside ours.

In the paper (section V) each expert has a thread, which holds the locks of its candidate ranks while it
chooses, so that experts with a common candidate choose in turn. In our kernel all experts choose at once, and
again until no choice changes. Times need a GPU; the numbers of turns are exact.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.papers.figures.common import Options, PaperFigure, Rows, summarise_runs, with_progress
from benchmarks.papers.figures.metro import BATCHES, HalvedTrace, read_halves
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.metro_torch import TorchMetro

SIZES = (32, 256)  # requests of a batch
RATIO = 1.5  # slots of each expert, as in the paper's largest


def kernel(options: Options) -> Rows:
    """Count the turns of both kernels, means over the layers of batches of each trace."""
    rows: Rows = []
    for halves, size in with_progress(product(read_halves(options), SIZES)):
        runs = [
            _count_turns(half, size, options.requests or BATCHES, seed)
            for seed, half in zip(options.seeds, halves, strict=True)
        ]
        row = {"model": halves[0].name, "batch_size": size, "replication": RATIO}
        rows.append(row | summarise_runs(runs))
    return rows


def lock_turns(hosts: NDArray[np.bool_], arrival: NDArray[np.int64]) -> int:
    """Return the turns of threads with locks, if each takes its locks as early as the order allows.

    Args:
        hosts: bool[E, G], the candidate ranks of each expert.
        arrival: int[A], the active experts in the order of their threads.
    """
    last_turn = np.zeros(hosts.shape[1], np.int64)
    for expert in arrival:
        last_turn[hosts[expert]] = 1 + last_turn[hosts[expert]].max()
    return int(last_turn.max(initial=0))


class CountingMetro(TorchMetro):
    """A decision that counts its rounds.

    Attributes:
        num_rounds: rounds of the last decision.
    """

    num_rounds = 0

    def route(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_rounds = 0
        return super().route(tokens)

    def is_final(self, best: torch.Tensor, last: torch.Tensor) -> bool:
        self.num_rounds += 1
        return super().is_final(best, last)


def plan_of_layer(plan: MetroPlan, layer: int) -> MetroPlan:
    """Return the plan of one layer, without the experts that pad its order in a plan of many layers."""
    shares = plan.shares[layer]
    num_choosing = int(((shares >= 0).sum(axis=1) > 1).sum())
    order = plan.order[layer, plan.order.shape[1] - num_choosing :]
    return MetroPlan(shares[None], order[None])


def _count_turns(half: HalvedTrace, size: int, number: int, seed: int) -> dict[str, float]:
    """Return what the decision for one layer takes, means over `number` batches and their layers."""
    plan = half.plan(RATIO)
    batches = half.batches(size, number, seed)
    rng = np.random.default_rng([seed, size])
    counted = []
    for layer, shares in enumerate(plan.shares):
        hosts = shares >= 0
        metro = CountingMetro(plan_of_layer(plan, layer))
        for tokens in batches[:, layer]:
            active = rng.permutation(np.flatnonzero(tokens))
            metro.route(torch.from_numpy(tokens[None]))
            counted.append((len(active), lock_turns(hosts, active), metro.num_rounds))
    means = np.mean(counted, axis=0)
    return dict(zip(("active_experts", "lock_turns", "rounds"), means.tolist(), strict=True))


FIGURES = {
    "kernel": PaperFigure(
        "Turns that a kernel takes one after another: threads with locks, and all experts at once",
        "locks leave less than 64 threads of parallelism (section V)",
        kernel,
    ),
}
