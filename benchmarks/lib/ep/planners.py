"""Plans of migration before a window of requests: offline, reactive (EPLB) and proactive (DIRECTOR).

Tensor-parallel ranks all have all tokens, so an expert has the same price on every rank, and DIRECTOR's
workload by rank has no effect. Data-parallel ranks have tokens of their own. There `proactive, by rank` adds
the price of sending them, as the paper does. Our engines gather all tokens on all ranks, so they send no
messages of an all-to-all, which this would save. Those messages are counted instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.lib.captured_routes import CapturedRoutes
from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.expert_placement import Topology
from offline.expert_placement.alignment import minimise_moves
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.director import renewed_placement
from offline.expert_placement.forecast import workload_by_rank
from offline.expert_placement.packed_placements import eplb_placement

BY_RANK = "proactive, by rank"
Migration = tuple[Ints, Floats] | None  # placement and load; None: nothing moves
# From a window's requests, the current placement, and the routes of the previous window.
PlanMigration = Callable[[Ints, Ints, Ints | None], Migration]


def state_bytes(model: Path) -> int:
    """Return the bytes of a token's hidden state in 32 bits."""
    hidden_size: int = json.loads((model / "config.json").read_text())["hidden_size"]
    return 4 * hidden_size


def migration_planners(
    data: CapturedRoutes, slots: int, ranks: int, cost: LayerCost, seed: int, token_bytes: float | None
) -> dict[str, PlanMigration]:
    """Return the planners by name.

    Args:
        slots: slots of a layer.
        token_bytes: bytes that a token sends to another rank; None: all ranks have all tokens.
    """

    def offline(requests: Ints, placement: Ints, previous_routes: Ints | None) -> Migration:
        return None

    def reactive(requests: Ints, placement: Ints, previous_routes: Ints | None) -> Migration:
        if previous_routes is None:
            return None
        target = eplb_placement(previous_routes, slots, groups=1, nodes=1, ranks=ranks)
        return minimise_moves(placement, target, ranks, ranks_alike=True), previous_routes.astype(float)

    def plan_proactively(requests: Ints, placement: Ints, sent_bytes: float) -> Migration:
        counts, tokens = data.trace.prefill_counts[requests], data.trace.prompt_tokens[requests]
        topology = Topology(ranks=ranks)
        expected = workload_by_rank(counts, tokens, 1, topology)
        target, _ = renewed_placement(
            expected,
            placement,
            topology=topology,
            slots=slots // ranks,
            cost=cost,
            token_bytes=sent_bytes,
            seed=seed,
        )
        return target, expected.sum(axis=1)

    def proactive(requests: Ints, placement: Ints, previous_routes: Ints | None) -> Migration:
        return plan_proactively(requests, placement, 0.0)

    def by_rank(requests: Ints, placement: Ints, previous_routes: Ints | None) -> Migration:
        return plan_proactively(requests, placement, token_bytes or 0.0)

    planners: dict[str, PlanMigration] = {"offline": offline, "reactive": reactive, "proactive": proactive}
    return planners if token_bytes is None else planners | {BY_RANK: by_rank}
