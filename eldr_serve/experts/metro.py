"""Which replica serves an expert's tokens in one batch, so that no rank activates too many experts.

A decode step waits for its slowest rank, and a rank's time follows the expert replicas that it
activates (METRO, section III). All functions take `tokens` int[..., E], the batch's tokens of each
expert, and `hosts` bool[..., E, G], which ranks hold it; leading axes (layers) are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
_FITTING_ROUNDS = 50
UNIT = 1 << 10  # of load: one activated expert
LARGEST = 1 << 17  # pairs of expert and rank: a load and a rank beside it stay within int32


@dataclass(frozen=True, eq=False)
class MetroPlan:
    """What METRO's greedy asks of a placement, made once; layers N are independent.

    Attributes:
        shares: int64[N, E, G], what a rank is expected to bear of an expert whose turn is yet to come, in
            units of 1 / UNIT of an expert; -1 where the rank does not hold it.
        order: int64[N, M], the experts that have a choice, fewest hosts first; experts without one fill
            the rows of layers that have fewer.
    """

    shares: Ints
    order: Ints

    @classmethod
    def of(cls, hosts: ArrayLike) -> MetroPlan:
        """The plan of hosts bool[..., E, G].

        Raises:
            ValueError: another shape, or a size at which loads would not fit into 31 bits.
        """
        held = np.asarray(hosts, bool)
        if held.ndim < 2:
            raise ValueError(f"hosts of shape {held.shape} are not [..., experts, ranks]")
        experts, ranks = held.shape[-2:]
        if experts * ranks > LARGEST:
            raise ValueError(f"{experts} experts on {ranks} ranks are more than {LARGEST} pairs")
        held = held.reshape(-1, experts, ranks)
        replicas = held.sum(axis=2)
        choosing = int((replicas > 1).sum(axis=1).max(initial=0))
        order = np.argsort(replicas, axis=1, kind="stable")[:, experts - choosing :]
        return cls(np.where(held, _fair_shares(held), -1), order)

    def route(self, tokens: ArrayLike) -> Ints:
        """The greedy's choice for one batch of tokens int[..., E]; returns and raises as `route_metro`."""
        count = _checked_tokens(tokens, self.shares >= 0)
        wanted = count > 0
        expected = np.where(wanted[..., None], np.maximum(self.shares, 0), 0)
        load = expected.sum(axis=1)
        rank = self.shares.argmax(axis=2)
        layer = np.arange(len(count))
        for expert in self.order.T:
            mine = layer, expert
            load -= expected[mine]
            choice = np.where(self.shares[mine] >= 0, load, np.iinfo(np.int64).max).argmin(axis=1)
            load[layer, choice] += UNIT * wanted[mine]
            rank[mine] = choice
        return np.where(wanted, rank, -1).reshape(np.shape(tokens))


def route_metro(tokens: ArrayLike, hosts: ArrayLike) -> Ints:
    """METRO's greedy (Algorithm 1): each expert in turn to the host with the fewest activated experts.

    Experts with fewer hosts choose first, and a host counts, beside its activated experts, its fair share
    of those whose turn is yet to come; the first of equal hosts serves. The paper leaves the order to the
    race of its threads and knows no shares; both together bring the greedy to the optimum but for about a
    percent. Who routes many batches makes the `MetroPlan` once.

    Returns:
        int[..., E] rank of each expert; -1 where it has no tokens.

    Raises:
        ValueError: shapes that do not agree, or an expert with tokens and no host.
    """
    checked(tokens, hosts)
    return MetroPlan.of(hosts).route(tokens)


def checked(tokens: ArrayLike, hosts: ArrayLike) -> tuple[Ints, NDArray[np.bool_]]:
    """int64[N, E] and bool[N, E, G]; ValueError if the shapes do not agree."""
    count, held = np.asarray(tokens), np.asarray(hosts, bool)
    if held.ndim < 2 or count.shape != held.shape[:-1]:
        raise ValueError(f"tokens of shape {count.shape} do not go with hosts of shape {held.shape}")
    held = held.reshape(-1, *held.shape[-2:])
    return _checked_tokens(count, held), held


def _checked_tokens(tokens: ArrayLike, held: NDArray[np.bool_]) -> Ints:
    """int64[N, E] of tokens[..., E], with held bool[N, E, G]."""
    count = np.asarray(tokens)
    if count.size != held.shape[0] * held.shape[1] or count.shape[-1:] != held.shape[1:2]:
        raise ValueError(f"tokens of shape {count.shape} do not go with hosts of shape {held.shape}")
    if count.size and count.min() < 0:
        raise ValueError("tokens must be 0 or more")
    count = count.reshape(held.shape[:2]).astype(np.int64)
    homeless = np.argwhere((count > 0) & ~held.any(axis=2))
    if len(homeless):
        raise ValueError(f"expert {homeless[0][1]} has tokens and no rank holds it")
    return count


def _fair_shares(held: NDArray[np.bool_]) -> Ints:
    """int64[N, E, G]: how each expert is split over its hosts so that ranks bear alike, if all are active.

    Iterative proportional fitting: ranks and experts are scaled to their sums in turn.
    """
    share = held.astype(np.float64)
    for _ in range(_FITTING_ROUNDS):
        for axis in (1, 2):
            share /= np.maximum(share.sum(axis=axis, keepdims=True), np.finfo(np.float64).tiny)
    return np.rint(UNIT * share).astype(np.int64)
