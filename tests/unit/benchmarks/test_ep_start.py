"""What an engine does on each way to the placement of its position, without an engine."""

from typing import Any

import numpy as np
import pytest

from benchmarks.lib.captured_routes import CapturedRoutes
from benchmarks.lib.ep.engine import DecodedBatch
from benchmarks.lib.ep.rows import KEEPS, MIGRATES, STARTS
from benchmarks.papers.ep_start import measure_batches
from eldr_serve.errors import UserInputError
from tests.support.traces import synthetic_trace

LINEAR, OWN = [[0, 1, 2, 3]] * 2, [[0, 2, 1, 3], [3, 1, 2, 0]]


class FakeEpEngine:
    """An engine of instant steps that records its placements."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.calls: list[tuple[str, Any]] = []

    def place(self, placement: np.ndarray, rule: str, load: np.ndarray) -> None:
        assert rule == "none"
        assert load.shape == placement.shape
        self.calls.append(("place", placement.tolist()))

    def decode(self, prompts: Any, tokens: int, *, name: str, migrate_to: Any = None) -> DecodedBatch:
        assert name
        self.calls.append(("decode", None if migrate_to is None else migrate_to.tolist()))
        slices = 0 if migrate_to is None else self.slices
        answers, log = np.zeros((len(prompts), tokens), int), np.ones((2, tokens, 2, 5), int)
        return DecodedBatch(
            answers,
            np.full(tokens, 0.01),
            move_s=0.005 * slices,
            experts_moved=8 * slices,
            received_bytes=slices << 20,
            slices=slices,
            slices_left=0,
            log=log,
            routed=answers,
            placement=answers,
        )


def measure(engine: Any, way: str) -> list[dict[str, Any]]:
    data = CapturedRoutes(synthetic_trace(n=3, num_layers=2, num_experts=4), [[1] * 70] * 3)
    batches = [(np.array([0, 2]), np.array(OWN)), (np.array([1]), np.array(LINEAR))]
    return measure_batches(engine, data, batches, way, 8)


@pytest.mark.parametrize(
    ("way", "placed", "migrated_to"),
    [(STARTS, OWN, None), (MIGRATES, LINEAR, OWN), (KEEPS, LINEAR, None)],
)
def test_an_engine_has_its_placement_from_the_start_or_migrates_to_it(
    way: str, placed: list[list[int]], migrated_to: list[list[int]] | None
) -> None:
    engine = FakeEpEngine(slices=7)
    first, second = measure(engine, way)
    assert engine.calls[:2] == [("place", placed), ("decode", migrated_to)]
    assert len(engine.calls) == 4
    assert (len(first["answers"]), len(second["answers"])) == (2, 1)
    assert first["steps_ms"] == pytest.approx([10] * 8)
    moved = [7, 56, 7.0, 35.0] if way == MIGRATES else [0, 0, 0, 0]
    keys = ("slices", "experts_moved", "received_mib", "migration_ms")
    assert [first[key] for key in keys] == pytest.approx(moved)


def test_a_batch_that_ends_before_the_migration_is_refused() -> None:
    with pytest.raises(UserInputError, match="--tokens is 8, too few for the 8 slices"):
        measure(FakeEpEngine(slices=8), MIGRATES)
