"""vLLM's own EPLB code accepts our placements: its maps equal ours."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed.eplb.eplb_state import _commit_eplb_maps, compute_logical_maps
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from eldr_serve.experts.expert_placement import ExpertPlacement, Topology
from offline.expert_placement.co_activation import co_activation, expert_load
from offline.expert_placement.grace import grace_placement
from offline.expert_placement.packed_placements import activation_placement, eplb_placement

LAYERS, EXPERTS, RANKS, SLOTS = 3, 8, 4, 12


def placements() -> list[ExpertPlacement]:
    rng = np.random.default_rng(0)
    routes = np.argsort(rng.gumbel(size=(500, LAYERS, EXPERTS)) + np.arange(EXPERTS) / 3)[..., -2:]
    load = expert_load(routes, EXPERTS)
    topology = Topology(ranks=RANKS, nodes=2)
    slots_by_method = {
        "eplb": eplb_placement(load, SLOTS, groups=1, nodes=1, ranks=RANKS),
        "activation": activation_placement(load / len(routes), RANKS),
        "grace": grace_placement(co_activation(routes, EXPERTS), load, SLOTS, topology)[0],
    }
    return [ExpertPlacement(slots, RANKS, EXPERTS, "m", name) for name, slots in slots_by_method.items()]


def test_vllm_finds_every_replica_where_we_put_it() -> None:
    for placement in placements():
        slots = torch.from_numpy(placement.physical_to_logical)
        where, count = compute_logical_maps(slots, EXPERTS)
        each = slots.shape[1] // RANKS
        assert int(count.sum()) == slots.numel()
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                found = where[layer, expert, : count[layer, expert]]
                assert (slots[layer, found] == expert).all()
                ranks = np.unique(found.numpy() // each)
                assert ranks.tolist() == np.flatnonzero(placement.hosts[layer, expert]).tolist()


def test_vllm_commits_our_map() -> None:
    for placement in placements():
        slots = torch.from_numpy(placement.physical_to_logical)
        linear = torch.arange(slots.shape[1]).remainder(EXPERTS).repeat(LAYERS, 1)
        where, count = compute_logical_maps(linear, EXPERTS)
        room = torch.full((LAYERS, EXPERTS, 1 + slots.shape[1] - EXPERTS), -1)
        room[..., : where.shape[2]] = where
        state = SimpleNamespace(
            physical_to_logical_map=linear, logical_to_physical_map=room, logical_replica_count=count
        )
        _commit_eplb_maps(state, slots)
        assert torch.equal(state.physical_to_logical_map, slots)
        assert state.logical_replica_count.sum() == slots.numel()


def test_vllm_s_policy_balances_no_better_than_ours() -> None:
    load = np.random.default_rng(1).exponential(size=(LAYERS, EXPERTS)) * 100
    theirs = DefaultEplbPolicy.rebalance_experts(torch.from_numpy(load), SLOTS, 1, 1, RANKS)
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).numpy()
    ours = eplb_placement(load, SLOTS, groups=1, nodes=1, ranks=RANKS)

    def heaviest(slots: np.ndarray) -> np.ndarray:
        replicas = np.stack([np.bincount(row, minlength=EXPERTS) for row in slots])
        share = np.take_along_axis(load / replicas, slots, axis=1)
        return share.reshape(LAYERS, RANKS, -1).sum(axis=2).max(axis=1)

    assert (heaviest(ours) <= heaviest(theirs) * (1 + 1e-6)).all()
