"""METRO in NumPy: choice of a replica per expert and batch that balances active experts over ranks.

A decode step waits for its slowest rank, and a rank's time grows with the number of expert replicas that it
activates (METRO, section III). All functions take `tokens` int[..., E], the batch's tokens of each expert,
and `hosts` bool[..., E, G], whether a rank holds the expert. Leading axes (layers) are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.arrays import Ints

_FITTING_ROUNDS = 50
EXPERT_LOAD = 1 << 10  # load of one active expert
MAX_PAIRS = 1 << 17  # maximum pairs of expert and rank, so that load and rank together fit into int32


@dataclass(frozen=True, eq=False)
class MetroPlan:
    """Precomputed tables of a placement for METRO's greedy algorithm; the N layers are independent.

    Attributes:
        shares: int64[N, E, G], expected share of a rank in an expert that is not yet assigned, in units of
            1 / EXPERT_LOAD of an expert; -1 where the rank does not hold it.
        order: int64[N, M], experts with several hosts, fewest hosts first; other experts pad shorter rows.
            A plan of `as_written` has all experts.
    """

    shares: Ints
    order: Ints

    @classmethod
    def from_hosts(cls, hosts: ArrayLike) -> MetroPlan:
        """Create the plan of hosts bool[..., E, G].

        Raises:
            ValueError: the shape is wrong, or so large that loads would not fit into 31 bits.
        """
        hosted = _parse_hosts(hosts)
        experts = hosted.shape[1]
        replicas = hosted.sum(axis=2)
        num_choosing = int((replicas > 1).sum(axis=1).max(initial=0))
        order = np.argsort(replicas, axis=1, kind="stable")[:, experts - num_choosing :]
        return cls(np.where(hosted, _fair_shares(hosted), -1), order)

    @classmethod
    def as_written(cls, hosts: ArrayLike) -> MetroPlan:
        """Create the plan of the paper's Algorithm 1: no fair shares, and experts in the order of their ids.

        The paper's threads take their locks in any order; this is one of the orders.

        Args:
            hosts: as for `from_hosts`, with the same errors.
        """
        hosted = _parse_hosts(hosts)
        return cls(np.where(hosted, 0, -1), np.tile(np.arange(hosted.shape[1]), (len(hosted), 1)))

    def route(self, tokens: ArrayLike) -> Ints:
        """Run the greedy algorithm for a batch of tokens int[..., E]; see `route_metro`."""
        count = _parse_tokens(tokens, self.shares >= 0)
        active = count > 0
        expected = np.where(active[..., None], np.maximum(self.shares, 0), 0)
        load = expected.sum(axis=1)
        rank = self.shares.argmax(axis=2)
        layer = np.arange(len(count))
        for expert in self.order.T:
            cell = layer, expert
            load -= expected[cell]
            choice = np.where(self.shares[cell] >= 0, load, np.iinfo(np.int64).max).argmin(axis=1)
            load[layer, choice] += EXPERT_LOAD * active[cell]
            rank[cell] = choice
        return np.where(active, rank, -1).reshape(np.shape(tokens))


def route_metro(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """Assign each expert to its least loaded host, by METRO's greedy algorithm with a fixed order of experts.

    Experts with fewer hosts are assigned first. The load of a host is the number of its active experts plus
    its fair share of unassigned ones; the first host wins ties. With these two rules, which the paper's
    Algorithm 1 (`MetroPlan.as_written`) lacks, the result is within about one percent of the optimum. To
    route many batches, create one `MetroPlan`.

    Returns:
        int[..., E] rank of each expert; -1 where it has no tokens.

    Raises:
        ValueError: the shapes do not agree, or an expert has tokens and no host.
    """
    parse_batch(tokens, hosts)
    return MetroPlan.from_hosts(hosts).route(tokens)


def _parse_hosts(hosts: ArrayLike) -> NDArray[np.bool_]:
    """Return hosts[..., E, G] as bool[N, E, G]; raise ValueError if no plan can have them."""
    hosted = np.asarray(hosts, bool)
    if hosted.ndim < 2:
        raise ValueError(f"hosts of shape {hosted.shape} are not [..., experts, ranks]")
    experts, ranks = hosted.shape[-2:]
    if experts * ranks > MAX_PAIRS:
        raise ValueError(f"{experts} experts on {ranks} ranks are more than {MAX_PAIRS} pairs")
    return hosted.reshape(-1, experts, ranks)


def parse_batch(tokens: ArrayLike, hosts: ArrayLike) -> tuple[Ints, NDArray[np.bool_]]:
    """Return tokens as int64[N, E] and hosts as bool[N, E, G]; raise ValueError if they do not agree."""
    count, hosted = np.asarray(tokens), np.asarray(hosts, bool)
    if hosted.ndim < 2 or count.shape != hosted.shape[:-1]:
        raise ValueError(f"tokens of shape {count.shape} do not go with hosts of shape {hosted.shape}")
    hosted = hosted.reshape(-1, *hosted.shape[-2:])
    return _parse_tokens(count, hosted), hosted


def _parse_tokens(tokens: ArrayLike, hosted: NDArray[np.bool_]) -> Ints:
    """Return tokens[..., E] as int64[N, E]; raise ValueError if they do not fit hosted bool[N, E, G]."""
    count = np.asarray(tokens)
    if count.size != hosted.shape[0] * hosted.shape[1] or count.shape[-1:] != hosted.shape[1:2]:
        raise ValueError(f"tokens of shape {count.shape} do not go with hosts of shape {hosted.shape}")
    if count.size and count.min() < 0:
        raise ValueError("tokens must be 0 or more")
    count = count.reshape(hosted.shape[:2]).astype(np.int64)
    unhosted = np.argwhere((count > 0) & ~hosted.any(axis=2))
    if len(unhosted):
        raise ValueError(f"expert {unhosted[0][1]} has tokens and no rank holds it")
    return count


def _fair_shares(hosted: NDArray[np.bool_]) -> Ints:
    """Return the split of experts over hosts that balances the ranks if all are active, int64[N, E, G].

    Iterative proportional fitting: ranks and experts are scaled to their sums in turn.
    """
    share = hosted.astype(np.float64)
    for _ in range(_FITTING_ROUNDS):
        for axis in (1, 2):
            share /= np.maximum(share.sum(axis=axis, keepdims=True), np.finfo(np.float64).tiny)
    return np.rint(EXPERT_LOAD * share).astype(np.int64)
