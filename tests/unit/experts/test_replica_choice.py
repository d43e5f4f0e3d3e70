"""Replica choice: every pair goes to a slot of its expert, by the rule."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.experts.expert_placement import Topology
from eldr_serve.experts.parallel.metro import MetroPlan, route_metro
from eldr_serve.experts.parallel.moves import fill_with_replicas
from eldr_serve.experts.parallel.replica_choice import RULES, NearestReplica, make_choice, slots_by_rank
from tests.support.shipped import ROOT


class ChoiceCase(NamedTuple):
    row: np.ndarray  # int[P]
    experts: int
    topology: Topology
    batch: torch.Tensor  # int32[T, k]

    @property
    def slots(self) -> np.ndarray:
        return slots_by_rank(self.row, self.experts, self.topology.ranks)

    @property
    def size(self) -> int:
        return len(self.row) // self.topology.ranks


@st.composite
def cases(draw: Any) -> ChoiceCase:
    ranks, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 5))
    slots = ranks * size
    experts = draw(st.integers(2, slots))
    more = draw(st.lists(st.integers(-1, experts - 1), min_size=slots - experts, max_size=slots - experts))
    row = np.array(draw(st.permutations([*range(experts), *more])))
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, min(experts, 3)))
    batch = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    topology = Topology(ranks=ranks, nodes=draw(st.sampled_from([1, ranks])))
    return ChoiceCase(row, experts, topology, batch.argsort(dim=1)[:, :top_k].int())


@given(cases(), st.sampled_from(RULES))
def test_a_pair_is_served_by_a_replica_of_its_expert(case: ChoiceCase, rule: str) -> None:
    slots = make_choice(rule, case.row, case.experts, case.topology).slots(case.batch).numpy()
    assert np.array_equal(case.row[slots], case.batch.numpy())


@given(cases())
def test_metro_is_greedy_over_the_whole_batch(case: ChoiceCase) -> None:
    slots = make_choice("metro", case.row, case.experts, case.topology).slots(case.batch).numpy()
    tokens = np.bincount(case.batch.numpy().ravel(), minlength=case.experts)
    assert np.array_equal(slots // case.size, route_metro(tokens, case.slots >= 0)[case.batch.numpy()])


@given(cases())
def test_metro_paper_is_algorithm_1_over_the_whole_batch(case: ChoiceCase) -> None:
    slots = make_choice("metro-paper", case.row, case.experts, case.topology).slots(case.batch).numpy()
    tokens = np.bincount(case.batch.numpy().ravel(), minlength=case.experts)
    ranks = MetroPlan.as_written(case.slots >= 0).route(tokens)
    assert np.array_equal(slots // case.size, ranks[case.batch.numpy()])


@pytest.mark.parametrize(("rule", "plans"), [("metro", ["from_hosts"]), ("metro-paper", ["as_written"])])
def test_each_form_of_metro_is_called_by_its_name(
    rule: str, plans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def watch(name: str) -> None:
        make = getattr(MetroPlan, name)

        def plan(hosts: np.ndarray) -> MetroPlan:
            called.append(name)
            return make(hosts)

        monkeypatch.setattr(MetroPlan, name, plan)

    watch("from_hosts")
    watch("as_written")
    # Experts 0 and 1 have both ranks, 2 only the first: Algorithm 1 takes 0 before it knows of 2.
    choice = make_choice(rule, [0, 1, 2, 0, 1, -1], 3, Topology(ranks=2))
    slots = choice.slots(torch.tensor([[0, 2]])).tolist()
    assert called == plans
    assert slots == ([[3, 2]] if rule == "metro" else [[0, 2]])


@given(cases())
def test_even_is_vllms_hash_of_the_position_over_all_slots(case: ChoiceCase) -> None:
    slots = make_choice("even", case.row, case.experts, case.topology).slots(case.batch).numpy()
    for place, experts in enumerate(case.batch.tolist()):
        for column, expert in enumerate(experts):
            replicas = np.flatnonzero(case.row == expert)
            assert slots[place, column] == replicas[place * 2654435769 % 2**32 % len(replicas)]


@given(cases(), st.booleans())
def test_local_chooses_the_replica_nearest_to_the_tokens_rank(case: ChoiceCase, given_homes: bool) -> None:
    node, tokens, ranks = case.topology.node_of, len(case.batch), case.topology.ranks
    homes = [place * ranks // tokens for place in range(tokens)]
    if given_homes:  # homes as of data-parallel ranks, whose batches differ in size
        homes = [ranks - 1 if place < tokens // 3 else 0 for place in range(tokens)]
    choice = make_choice("local", case.row, case.experts, case.topology)
    slots = choice.slots(case.batch, torch.tensor(homes, dtype=torch.int64) if given_homes else None).numpy()
    for place, experts in enumerate(case.batch.tolist()):
        home = homes[place]
        for column, expert in enumerate(experts):
            hosts = np.flatnonzero(case.slots[expert] >= 0)
            own_hosts = hosts[hosts == home]
            near = hosts[node[hosts] == node[home]]
            nearest = own_hosts if len(own_hosts) else near if len(near) else hosts
            assert slots[place, column] // case.size in nearest


@given(cases())
def test_a_rank_that_routes_alone_chooses_its_nearest_replica(case: ChoiceCase) -> None:
    for rank in range(case.topology.ranks):
        slots = NearestReplica(case.slots, case.topology, rank).slots(case.batch).numpy()
        assert np.array_equal(case.row[slots], case.batch.numpy())
        is_local = case.slots[case.batch.numpy(), rank] >= 0
        assert (slots[is_local] // case.size == rank).all()


def test_weighted_is_proportional_to_the_inverse_load() -> None:
    row = np.array([0, 1, 0, 2])  # expert 0 on both ranks, expert 1 on rank 0, expert 2 on rank 1
    choice = make_choice("weighted", row, 3, Topology(ranks=2), load=[2.0, 8.0, 2.0])  # 9 and 3 expected
    slots = choice.slots(torch.zeros(4000, 1, dtype=torch.int32))
    assert (slots == 2).float().mean().item() == pytest.approx(0.75, abs=0.01)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'best': there are even, local, metro, metro-paper, none, weighted"):
        make_choice("best", [0, 1], 2, Topology(ranks=2))


def test_the_shipped_deployment_gives_metro_a_choice() -> None:
    document = yaml.safe_load((ROOT / "deployments/cpu_demo_ep.yaml").read_text())
    kwargs = document["applications"][0]["args"]["decode_config"]["engine_kwargs"]
    config = kwargs["additional_config"]["eldr_experts"]
    assert config == {"redundant_experts": 16, "fill_redundant": True, "replica_choice": "metro"}
    spare = np.full((2, 8), -1)
    row = fill_with_replicas(np.concatenate([np.arange(64).reshape(2, 32), spare], axis=1).ravel(), 2)
    choice = make_choice("metro", row, 64, Topology(ranks=2))
    batch = torch.arange(8)[:, None]  # experts of the first rank, which the second holds too
    assert set((choice.slots(batch) // 40).flatten().tolist()) == {0, 1}
