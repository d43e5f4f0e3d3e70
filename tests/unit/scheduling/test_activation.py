"""Expected activation of running requests that are assigned again, as a change of workers does."""

import numpy as np

from eldr_serve.scheduling import PlacementRequest
from eldr_serve.scheduling.activation import ExpectedActivation, levels_of
from tests.support.tables import request

L, E, TOKENS = 9, 16, 50


def counted_request(name: str, rng: np.random.Generator) -> PlacementRequest:
    return request(name, TOKENS, expert_counts=rng.integers(0, TOKENS + 1, (L, E)).astype(np.uint16))


def assign(activation: ExpectedActivation, asked: PlacementRequest, worker: int) -> None:
    activation.on_assigned(asked, worker, activation.estimate_levels(asked))


def test_a_request_that_stays_on_its_worker_changes_nothing_and_is_not_computed_again() -> None:
    rng, activation = np.random.default_rng(0), ExpectedActivation()
    placed = [(counted_request(f"r{number}", rng), number % 3) for number in range(12)]
    for placed_request, worker in placed:
        assign(activation, placed_request, worker)
    assert activation.mean is not None
    names = ("p_idle", "expected_active", "squared_levels", "mean")
    before = {name: getattr(activation, name).copy() for name in names}
    levels = [activation.running[placed_request.request_id][1] for placed_request, _ in placed]
    for placed_request, worker in placed:
        assign(activation, placed_request, worker)
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(activation, name), array)
    assert all(
        activation.estimate_levels(placed_request) is known
        for (placed_request, _), known in zip(placed, levels, strict=True)
    )


def test_a_request_that_moves_or_is_measured_again_counts_once() -> None:
    rng, activation, fresh = np.random.default_rng(1), ExpectedActivation(), ExpectedActivation()
    first, again, other = counted_request("a", rng), counted_request("a", rng), counted_request("b", rng)
    for placed_request, worker in ((first, 0), (other, 1), (first, 1), (again, 1), (again, 2)):
        assign(activation, placed_request, worker)
    for placed_request, worker in ((other, 1), (again, 2)):
        assign(fresh, placed_request, worker)
    np.testing.assert_array_equal(activation.squared_levels, fresh.squared_levels)
    np.testing.assert_array_equal(activation.p_idle, fresh.p_idle)
    for name in "ab":
        activation.on_finished(name)
    assert not activation.squared_levels.any()


def test_the_counts_of_a_resumed_answer_are_divided_by_all_their_tokens() -> None:
    activation, resumed = ExpectedActivation(), 3 * TOKENS
    counts = np.full((1, E), TOKENS, np.uint16)
    assign(activation, request("a", TOKENS, expert_counts=counts, resumed_tokens=resumed), 0)
    np.testing.assert_array_equal(activation.running["a"][1], levels_of(np.full(E, 0.25)))


def test_rows_from_before_the_first_counts_change_nothing() -> None:
    """The price of a shadow's tokens needs a row of each worker, also while no counts are known."""
    rng, grown, fresh = np.random.default_rng(3), ExpectedActivation(), ExpectedActivation()
    assign(grown, request("unknown"), 0)
    grown.grow(3)
    assert grown.expected_active.tolist() == [0.0] * 3
    first = counted_request("a", rng)
    for activation in (grown, fresh):
        assign(activation, first, 1)
        activation.grow(3)
    for name in ("p_idle", "expected_active", "squared_levels"):
        np.testing.assert_array_equal(getattr(grown, name), getattr(fresh, name))


def test_a_request_without_counts_gets_the_current_mean_when_it_is_assigned_again() -> None:
    rng, activation = np.random.default_rng(2), ExpectedActivation()
    unknown = request("unknown")
    assign(activation, counted_request("a", rng), 0)
    assign(activation, unknown, 1)
    before = activation.running["unknown"][1]
    assert activation.estimate_levels(unknown) is before  # the mean is the same
    assign(activation, counted_request("b", rng), 0)
    assign(activation, unknown, 1)
    after = activation.running["unknown"][1]
    assert (after != before).any()
    assert activation.estimate_levels(unknown) is after
