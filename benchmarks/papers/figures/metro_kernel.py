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

from benchmarks.papers.figures.common import Options, PaperFigure, Rows, summarise_seeds, with_progress
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
        for key in runs[0]:
            row |= summarise_seeds(key, [run[key] for run in runs])
        rows.append(row)
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


def _count_turns(half: HalvedTrace, size: int, number: int, seed: int) -> dict[str, float]:
    """Return what the decision for one layer takes, means over `number` batches and their layers."""
    hosts = half.plan(RATIO).shares >= 0
    batches = half.batches(size, number, seed)
    rng = np.random.default_rng([seed, size])
    counted = []
    for layer, hosts_of_layer in enumerate(hosts):
        metro = TorchMetro(MetroPlan.from_hosts(hosts_of_layer))
        for tokens in batches[:, layer]:
            active = rng.permutation(np.flatnonzero(tokens))
            metro.route(torch.from_numpy(tokens[None]))
            counted.append((len(active), lock_turns(hosts_of_layer, active), metro.num_rounds))
    means = np.mean(counted, axis=0)
    return dict(zip(("active_experts", "lock_turns", "rounds"), means.tolist(), strict=True))


FIGURES = {
    "kernel": PaperFigure(
        "Turns that a kernel takes one after another: threads with locks, and all experts at once",
        "locks leave less than 64 threads of parallelism (section V)",
        kernel,
    ),
}
