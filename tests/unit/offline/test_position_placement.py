"""Placements by position are made again with the table, and given to every engine that holds another one."""

from typing import Any

import numpy as np
import pytest

from eldr_serve.commands.client import ServiceError
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology
from eldr_serve.experts.fitting.table import fit_table
from offline.expert_placement.methods import METHODS, Problem
from offline.position_placement import PositionPlacements, placements_of_clusters
from tests.support.tables import unit_table
from tests.support.traces import synthetic_trace

LAYERS, EXPERTS, RANKS, BATCH = 2, 8, 2, 4
PAIRS = [(0, 1), (0, 2), (0, 4)]  # the most active experts of requests of clusters 0, 1, 2


def sampled(*clusters: int, steps: int = 10) -> CalibrationTrace:
    """Return samples whose signature is that of these clusters of `unit_table`, in this order."""
    n = len(clusters)
    prefill, decode = np.zeros((2, n, LAYERS, EXPERTS), np.uint32)
    for row, cluster in enumerate(clusters):
        prefill[row][:, [cluster, 7]] = 5
        decode[row] = steps * np.array([1, 1, 1, 1, 1, 1, 0, 0]) // 10
        decode[row][:, PAIRS[cluster]] = steps * 8 // 10
    return CalibrationTrace(
        model="m",
        top_k=2,
        prefill_counts=prefill,
        decode_counts=decode,
        decode_steps=np.full(n, steps, np.uint32),
        prompt_tokens=np.full(n, 5, np.uint32),
        domains=[""] * n,
        ids=[str(row) for row in range(n)],
    )


class Service:
    """A service with these decode replicas, whose samples are of clusters 0, 1 and 2."""

    def __init__(self, *replicas: str, table: int = 2, slots: int = EXPERTS) -> None:
        self.live = unit_table(table)
        self.samples = sampled(0, 1, 2, 1, 0)
        self.positions = list(replicas)
        self.experts: dict[str, dict[str, Any]] = {}
        self.slots = slots
        self.traces = 0
        for replica in replicas:
            self.start(replica)

    def start(self, replica: str) -> None:
        self.experts[replica] = {"placement": "at the start", "ranks": RANKS, "slots": self.slots}

    def status(self) -> dict[str, Any]:
        workers = [{"worker": name, "position": number} for number, name in enumerate(self.positions)]
        return {"workers": workers, "ingress": {"experts": {k: dict(v) for k, v in self.experts.items()}}}

    def table(self) -> bytes:
        return self.live.to_bytes()

    def trace(self) -> bytes:
        self.traces += 1
        return self.samples.to_bytes()

    def place_experts(self, content: bytes, sidecar: bytes, replicas: list[str]) -> dict[str, Any]:
        (replica,) = replicas
        placement = ExpertPlacement.parse(content, sidecar, ("map", "meta"))
        self.experts[replica]["placement"] = placement.id
        return {replica: {"experts": 3}}

    def held(self) -> list[str]:
        """Return the placement of each position."""
        return [self.experts[name]["placement"] for name in self.positions]

    def wanted(self) -> list[str]:
        """Return the placement of each cluster of the live table."""
        return [p.id for p in placements_of_clusters(self.live, self.samples, RANKS, BATCH)]


def placements_for(service: Any) -> PositionPlacements:
    return PositionPlacements(service, BATCH)


def test_each_engine_gets_the_placement_of_its_cluster_once() -> None:
    service = Service("r1", "r0")
    placements = placements_for(service)
    sentences = list(placements.check())
    first, second = service.wanted()
    assert first != second
    assert service.held() == [first, second]
    assert sentences == [
        f"position 0: 3 experts moved, placement {first}",
        f"position 1: 3 experts moved, placement {second}",
    ]
    assert list(placements.check()) == []
    assert service.traces == 1


def test_the_most_active_experts_of_a_cluster_are_on_different_ranks() -> None:
    for pair, placement in zip(
        PAIRS, placements_of_clusters(unit_table(3), sampled(0, 1, 2), RANKS, BATCH), strict=True
    ):
        assert not (placement.hosts[:, pair[0]] & placement.hosts[:, pair[1]]).any()
        assert placement.num_redundant == 0
        assert placement.expected_tokens is not None
        assert set(placement.expected_tokens[0].argsort()[-2:].tolist()) == set(pair)


def test_counts_give_the_placements_that_routes_give() -> None:
    """`eldr place --method activation` reads routes, which sampled traffic does not have."""
    trace = synthetic_trace()
    table, _ = fit_table(trace, 3)
    cluster_of = np.array([table.similarity(counts).argmax() for counts in trace.prefill_counts])
    placements = placements_of_clusters(table, trace, 4, BATCH)
    assert len({placement.id for placement in placements}) == 3
    for cluster, placement in enumerate(placements):
        problem = Problem(
            routes=trace.decode_routes(np.flatnonzero(cluster_of == cluster)),
            num_experts=16,
            slots=16,
            topology=Topology(ranks=4),
            batch=BATCH,
            groups=1,
            cost=None,
            token_bytes=1,
            seed=0,
        )
        slots, _ = METHODS["activation"](problem)
        assert np.array_equal(placement.physical_to_logical, slots)


def test_a_refit_of_the_table_refits_the_placements() -> None:
    service = Service("r0", "r1")
    service.samples = sampled(0, 1)
    placements = placements_for(service)
    list(placements.check())
    before = service.held()
    decode = service.samples.decode_counts
    decode[:] = decode[::-1].copy()  # the clusters exchange their experts
    assert list(placements.check()) == []  # until a table is fitted to these samples
    service.live = unit_table(2, band=0.2)
    assert len(list(placements.check())) == 2
    assert service.held() == service.wanted() == before[::-1]
    service.live, service.samples = unit_table(3), sampled(0, 1, 2)  # a third replica has started
    service.positions.append("r2")
    service.start("r2")
    list(placements.check())
    assert service.held() == service.wanted()
    assert len(set(service.held())) == 3


def test_an_engine_that_replaces_another_one_gets_the_placement_of_its_position() -> None:
    service = Service("r0", "r1", "r2")
    placements = placements_for(service)
    list(placements.check())
    first, second = service.wanted()
    assert service.held() == [first, second, first]  # position 2 shares centroid 0
    service.positions[1] = "new"
    del service.experts["r1"]
    assert list(placements.check()) == []  # until the new engine has reported its experts
    service.start("new")
    assert list(placements.check()) == [f"position 1: 3 experts moved, placement {second}"]
    service.experts["r0"]["placement"] = "an operator's"
    list(placements.check())
    assert service.held() == [first, second, first]


def test_nothing_is_moved_without_samples_of_every_cluster_and_it_is_tried_again() -> None:
    service = Service("r0", "r1")
    placements = placements_for(service)
    for samples in (sampled(0, 0), sampled(0, 1, steps=0)):
        service.samples = samples
        with pytest.raises(UserInputError, match=r"cluster \d has a decode step yet"):
            list(placements.check())
    assert service.held() == ["at the start"] * 2
    service.samples = sampled(0, 1)
    assert len(list(placements.check())) == 2


def test_a_refused_swap_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("r0")
    placements = placements_for(service)

    def refuse(*_: Any) -> dict[str, Any]:
        raise ServiceError("a swap is under way")

    with monkeypatch.context() as patch:
        patch.setattr(service, "place_experts", refuse)
        with pytest.raises(UserInputError, match="under way"):
            list(placements.check())
    assert len(list(placements.check())) == 1


def test_redundant_slots_are_refused_in_one_sentence() -> None:
    with pytest.raises(UserInputError, match=r"10 slots for 8 experts.*remove `redundant_experts`"):
        list(placements_for(Service("r0", slots=10)).check())


def test_engines_that_cannot_move_experts_are_named_in_one_sentence() -> None:
    service = Service("r0")
    service.experts.clear()
    with pytest.raises(UserInputError, match="no decode engine reports experts that it can move"):
        list(placements_for(service).check())
