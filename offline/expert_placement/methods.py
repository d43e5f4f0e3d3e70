"""The methods of `offline.place` by name: each computes a placement of one problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.arrays import Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.co_activation import co_activation, expert_load
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.director import director_placement
from offline.expert_placement.director_paper import director_paper_placement
from offline.expert_placement.evaluate import home_ranks
from offline.expert_placement.grace import grace_placement
from offline.expert_placement.grace_paper import PAPER_GROUPING
from offline.expert_placement.grouping import OUR_GROUPING, Grouping
from offline.expert_placement.packed_placements import (
    activation_placement,
    activation_probability,
    eplb_placement,
)

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The input of a method: the routes to fit to, and where experts may go.

    Attributes:
        routes: [steps, L, k], decode steps of the requests to fit to.
        num_experts: E.
        slots: P, the total number.
        topology: ranks and nodes.
        batch: tokens of a decode step.
        groups: expert groups of the model.
        cost: cost of a layer; None: unknown.
        token_bytes: bytes of a token's hidden state.
        seed: seed of clustering and rounding.
    """

    routes: NDArray[np.unsignedinteger[Any]]
    num_experts: int
    slots: int
    topology: Topology
    batch: int
    groups: int
    cost: LayerCost | None
    token_bytes: float
    seed: int

    @cached_property
    def load(self) -> NDArray[np.float64]:
        """Return [L, E] tokens of each expert."""
        return expert_load(self.routes, self.num_experts)

    @cached_property
    def workload(self) -> NDArray[np.float64]:
        """Return [L, G, E] tokens of a decode step by source rank. The fitted steps are in equal blocks."""
        home = home_ranks(len(self.routes), self.topology)
        tokens = np.zeros((len(self.load), self.topology.ranks, self.num_experts))
        for rank in np.unique(home):
            tokens[:, rank] = expert_load(self.routes[home == rank], self.num_experts)
        return tokens * (self.batch / len(self.routes))

    @property
    def activation(self) -> NDArray[np.float64]:
        """Return [L, E] the probability that a step of `batch` tokens activates the expert."""
        return activation_probability(self.load, len(self.routes), self.batch)


def _place_by_eplb(problem: Problem) -> tuple[Ints, Report]:
    placement = eplb_placement(
        problem.load,
        problem.slots,
        groups=problem.groups,
        nodes=problem.topology.nodes,
        ranks=problem.topology.ranks,
    )
    return placement, {"groups": problem.groups}


def _place_by_activation(problem: Problem) -> tuple[Ints, Report]:
    if problem.slots != problem.num_experts:
        raise UserInputError("method activation places every expert once: omit --redundant and --slots")
    return activation_placement(problem.activation, problem.topology.ranks), {"batch": problem.batch}


def _place_by_grace(problem: Problem, grouping: Grouping = OUR_GROUPING) -> tuple[Ints, Report]:
    affinity = co_activation(problem.routes, problem.num_experts)
    return grace_placement(
        affinity, problem.load, problem.slots, problem.topology, seed=problem.seed, grouping=grouping
    )


def _place_by_director(problem: Problem) -> tuple[Ints, Report]:
    engine = _engine_of(problem, "director")
    placement, report = director_placement(problem.workload, seed=problem.seed, **engine)
    return placement, {
        "above_lp": report.excess_over_lp,
        "above_bound": report.excess_over_bound,
        "batch": problem.batch,
    }


def _place_by_director_paper(problem: Problem) -> tuple[Ints, Report]:
    engine = _engine_of(problem, "director-paper")
    placement, report = director_paper_placement(problem.workload, seed=problem.seed, **engine)
    return placement, asdict(report) | {"above_budget": report.above_budget, "batch": problem.batch}


def _engine_of(problem: Problem, method: str) -> dict[str, Any]:
    """Return DIRECTOR's arguments that describe the engine; raise UserInputError without a cost."""
    if problem.cost is None:
        raise UserInputError(f"method {method} weighs experts against tokens and bytes: give their --cost")
    return {
        "topology": problem.topology,
        "slots": problem.slots // problem.topology.ranks,
        "cost": problem.cost,
        "token_bytes": problem.token_bytes,
    }


METHODS: dict[str, Callable[[Problem], tuple[Ints, Report]]] = {
    "eplb": _place_by_eplb,
    "activation": _place_by_activation,
    "grace": _place_by_grace,
    "grace-paper": partial(_place_by_grace, grouping=PAPER_GROUPING),
    "director": _place_by_director,
    "director-paper": _place_by_director_paper,
}
