"""The workload of a pending batch: tokens by source rank and expert, and what they cost on the ranks.

Arrays: L layers, E experts, G ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.arrays import Floats
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology, hosts_of
from offline.expert_placement.cost import LayerCost, LayerWork


def split_by_source(workload: ArrayLike, topology: Topology) -> Floats:
    """Return the workload as float[L, G, E].

    Raises:
        UserInputError: the workload has another shape, is negative or is not finite.
    """
    tokens = np.asarray(workload, np.float64)
    if tokens.ndim == 2:
        tokens = _split_evenly(tokens, topology.ranks)
    if tokens.ndim != 3 or tokens.shape[1] != topology.ranks or not tokens.size:
        raise UserInputError(
            f"a workload of shape {np.shape(workload)} is neither [layers, experts] nor [layers, "
            f"{topology.ranks} ranks, experts]"
        )
    if not np.isfinite(tokens).all() or tokens.min() < 0:
        raise UserInputError("a workload must be finite and 0 or more")
    return tokens


def _split_evenly(tokens: Floats, ranks: int) -> Floats:
    """Return tokens [..., E] as [..., G, E], the same number from each source rank."""
    return np.repeat(tokens[..., None, :] / ranks, ranks, axis=-2)


def check_slots(ranks: int, slots: int, experts: int) -> None:
    """Raise UserInputError if ranks with this many slots each cannot hold all experts."""
    if slots < 1 or ranks * slots < experts:
        raise UserInputError(
            f"{ranks} ranks of {slots} slots cannot hold {experts} experts: "
            f"give each rank {-(-experts // ranks)} slots or more"
        )


def price_experts(
    tokens: Floats, topology: Topology, cost: LayerCost, token_bytes: float
) -> tuple[Floats, Floats]:
    """Return the prices of each expert on each rank, s.

    Args:
        tokens: float[L, G, E], from `split_by_source`.

    Returns:
        token_s[L, E, G], the price of all the expert's tokens on the rank, and active_s[L, E], the price of
        reading its weights.
    """
    tokens_of_all = tokens.sum(axis=1)
    # [L, E, nodes]
    by_node = np.stack([tokens[:, topology.node_of == n].sum(axis=1) for n in range(topology.nodes)], axis=2)
    tokens_of_rank, tokens_of_node = np.swapaxes(tokens, 1, 2), by_node[:, :, topology.node_of]
    token_s = (
        cost.per_token_s * tokens_of_all[..., None]
        + cost.near_byte_s * token_bytes * (tokens_of_node - tokens_of_rank)
        + cost.far_byte_s * token_bytes * (tokens_of_all[..., None] - tokens_of_node)
    )
    return token_s, cost.per_expert_s * (tokens_of_all > 0)


def placed_work(
    workload: ArrayLike, hosts: NDArray[np.bool_], *, topology: Topology, token_bytes: float = 0.0
) -> LayerWork:
    """Return the work of a batch on each rank.

    The replicas of an expert get equal shares of the tokens that each source rank has for it.

    Args:
        workload: [..., G, E] tokens by source rank and expert, or [..., E] if all ranks have the same tokens.
        hosts: bool[..., E, G], by `hosts_of`.
    """
    tokens = np.asarray(workload, np.float64)
    if tokens.ndim == hosts.ndim - 1:
        tokens = _split_evenly(tokens, topology.ranks)
    share = hosts / hosts.sum(axis=-1, keepdims=True)
    sent = tokens @ share  # [..., source, rank]
    same_node = topology.node_of[:, None] == topology.node_of[None, :]
    near, far = sent * (same_node & ~np.eye(topology.ranks, dtype=bool)), sent * ~same_node
    active = hosts & (tokens.sum(axis=-2) > 0)[..., None]
    return LayerWork(
        active.sum(axis=-2).astype(np.float64),
        sent.sum(axis=-2),
        token_bytes * near.sum(axis=-2),
        token_bytes * far.sum(axis=-2),
    )


def placement_time_s(
    workload: ArrayLike,
    placement: ArrayLike,
    *,
    topology: Topology,
    cost: LayerCost,
    token_bytes: float = 0.0,
) -> float:
    """Return the time of all layers under the cost, s, for a workload as in `placed_work`."""
    experts = np.shape(workload)[-1]
    hosts = hosts_of(placement, experts, topology.ranks)
    work = placed_work(workload, hosts, topology=topology, token_bytes=token_bytes)
    return float(cost.layer_s(work).sum())
