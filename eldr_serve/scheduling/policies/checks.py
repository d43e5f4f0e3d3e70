"""Conformance checks for authors of policies: `check_policy(MyPolicy)`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.scheduling.cost import StepCost
from eldr_serve.scheduling.policies.base import Policy, QueuedPolicy
from eldr_serve.scheduling.types import Decision, Loads, NoWorkerError, PlacementRequest

_LAYERS, _EXPERTS = 2, 8
_ROUNDS = 40


def check_policy(policy_class: type[Policy], **parameters: Any) -> list[str]:
    """Return the violations of the policy interface by a class, as sentences; empty if there are none.

    Args:
        parameters: parameters of the tested instances.
    """

    def make() -> Policy:
        return policy_class(**parameters).set_table(_Table())

    checks: dict[str, Callable[[Callable[[], Policy]], Iterator[str]]] = {
        "parameters": _check_parameters,
        "select": _check_select,
        "requests without usable counts": _check_odd_requests,
        "notifications": _check_notifications,
        "more and fewer workers": _check_more_and_fewer_workers,
        "a new table": _check_new_table,
        "dispatch": _check_dispatch,
        "repetition": _check_repetition,
    }
    violations: list[str] = []
    for what, check in checks.items():
        try:
            violations += check(make)
        except Exception as error:  # any exception of the class is a finding
            violations.append(f"{what}: it raised {error!r}")
    return list(dict.fromkeys(violations))


class _Table:
    """A table with one centroid per kind of request."""

    def __init__(self, kinds: int = 4, band: float = 0.1) -> None:
        self.centroids = np.eye(kinds, dtype=np.float32)
        self.band = band
        self.domains = [f"domain{n}" for n in range(kinds)]

    def similarity(self, expert_counts: NDArray[Any]) -> NDArray[np.float32]:
        if expert_counts.shape != (_LAYERS, _EXPERTS):
            raise ValueError("the counts have another shape")
        by_kind = expert_counts.sum(axis=0).reshape(len(self.centroids), -1).sum(axis=1)
        similarity: NDArray[np.float32] = (by_kind / max(1.0, np.linalg.norm(by_kind))).astype(np.float32)
        return similarity


def _request(name: str, rng: np.random.Generator) -> PlacementRequest:
    kind = int(rng.integers(4))
    counts = rng.integers(0, 3, (_LAYERS, _EXPERTS)).astype(np.uint16)
    counts[:, 2 * kind : 2 * kind + 2] += 20
    return PlacementRequest(
        name,
        int(rng.integers(30, 300)),
        50,
        expert_counts=counts,
        domain=f"domain{kind}",
        labels={"kind": f"label{kind}"},
        prompt_key=f"key{kind}",
        may_wait=True,
    )


def _loads(rng: np.random.Generator, num_workers: int = 4) -> Loads:
    in_flight = rng.integers(0, 6, num_workers)
    available = rng.random(num_workers) < 0.7
    available[rng.integers(num_workers)] = True
    return Loads(in_flight, in_flight * rng.integers(20, 200, num_workers), available)


def _copy(loads: Loads) -> Loads:
    return Loads.from_counts(loads.in_flight, loads.kv_tokens, loads.available)


def _check_decision(decision: Any, loads: Loads) -> Iterator[str]:
    if not isinstance(decision, Decision):
        yield f"it returned {decision!r} instead of a Decision"
    elif not 0 <= decision.position < len(loads):
        yield f"it chose position {decision.position} of {len(loads)}"
    elif not loads.available[decision.position]:
        yield "it chose a worker that is not available"


def _check_unchanged(call: str, loads: Loads, before: Loads) -> Iterator[str]:
    if not all(np.array_equal(getattr(loads, column), value) for column, value in vars(before).items()):
        yield f"{call} changed the loads, which belong to the caller"


def _place_each(
    policy: Policy, rng: np.random.Generator, requests: Iterable[PlacementRequest], num_workers: int = 4
) -> Iterator[str]:
    """Place each request; yield violations."""
    for request in requests:
        loads = _loads(rng, num_workers)
        before = _copy(loads)
        decision = policy.select(request, loads, rng)
        errors = [*_check_decision(decision, before), *_check_unchanged("select", loads, before)]
        yield from errors
        policy.on_assigned(request, int(before.available_positions[0]) if errors else decision.position)


def _check_parameters(make: Callable[[], Policy]) -> Iterator[str]:
    policy = make()
    as_json = json.loads(json.dumps(policy.parameters.model_dump(mode="json")))
    if type(policy)(**as_json).parameters != policy.parameters:
        yield "its parameters change in a round trip through JSON"


def _check_select(make: Callable[[], Policy]) -> Iterator[str]:
    rng, policy = np.random.default_rng(0), make()
    yield from _place_each(policy, rng, (_request(f"r{n}", rng) for n in range(_ROUNDS)))
    try:
        policy.select(_request("last", rng), Loads.from_counts([0, 0], available=False), rng)
        yield "select must raise NoWorkerError if no worker is available"
    except NoWorkerError:
        pass


def _check_odd_requests(make: Callable[[], Policy]) -> Iterator[str]:
    rng, plain = np.random.default_rng(1), _request("r", np.random.default_rng(1))
    ones = np.ones((_LAYERS, _EXPERTS), np.uint16)
    others: list[dict[str, Any]] = [
        {},
        {"prompt_tokens": 0},
        {"domain": None, "prompt_key": None, "labels": {}},
        {"max_new_tokens": 0},
    ]
    fields: list[dict[str, Any]] = [
        {"expert_counts": signature} | other
        for signature in (None, 0 * ones, ones[:, :3], np.ones(3, np.float32), ones)
        for other in others
    ]
    for similarity in (np.full(4, np.nan, np.float32), np.ones(9, np.float32)):
        fields.append({"expert_counts": None, "similarity": similarity})
    yield from _place_each(
        make(), rng, [replace(plain, request_id=f"odd{n}", **f) for n, f in enumerate(fields)]
    )


def _check_notifications(make: Callable[[], Policy]) -> Iterator[str]:
    """Send notifications about unknown requests, repeatedly, and about other workers than it chose."""
    rng, policy = np.random.default_rng(2), make()
    policy.on_finished("nobody")
    policy.on_aborted("nobody")
    policy.on_progress({})
    policy.update_cost_model(StepCost(1e-3, 1e-4, 1e-6, 1e-4))
    for n in range(_ROUNDS):
        request, loads = _request(f"r{n % 9}", rng), _loads(rng)
        decision = policy.select(request, loads, rng)
        yield from _check_decision(decision, loads)
        policy.on_assigned(request, decision.position, decision)
        policy.on_assigned(request, (decision.position + 1) % len(loads))
        policy.on_progress({request.request_id: n, "nobody": n})
        if n % 2:
            policy.on_finished(request.request_id)
            policy.on_finished(request.request_id)


def _check_more_and_fewer_workers(make: Callable[[], Policy]) -> Iterator[str]:
    rng, policy = np.random.default_rng(3), make()
    for num_workers in (1, 5, 2, 9, 4):
        requests = (_request(f"{num_workers}.{n}", rng) for n in range(6))
        yield from _place_each(policy, rng, requests, num_workers)


def _check_new_table(make: Callable[[], Policy]) -> Iterator[str]:
    rng, policy = np.random.default_rng(4), make()
    for table in (None, _Table(band=0.5), _Table(2)):
        policy = policy.set_table(table)
        if not isinstance(policy, Policy):
            yield "set_table must return the policy"
            return
        yield from _place_each(policy, rng, (_request(f"r{n}", rng) for n in range(6)))


def _check_dispatch(make: Callable[[], Policy]) -> Iterator[str]:
    policy = make()
    if not isinstance(policy, QueuedPolicy):
        return
    rng, waiting = np.random.default_rng(5), list[PlacementRequest]()
    if policy.dispatch([], _loads(rng), rng):
        yield "dispatch placed requests though none waits"
    for n in range(_ROUNDS):
        waiting += [_request(f"r{n}.{m}", rng) for m in range(rng.integers(4))]
        # At times no request runs: requests that are left waiting then would wait forever.
        loads = _loads(rng) if n % 4 else Loads.from_counts([0, 0, 0], available=[True, False, True])
        before = _copy(loads)
        decisions = policy.dispatch(tuple(waiting), loads, rng)
        yield from _check_unchanged("dispatch", loads, before)
        indices = [index for index, _ in decisions]
        if len(set(indices)) < len(indices) or not all(0 <= index < len(waiting) for index in indices):
            yield "dispatch must give each index into `waiting` at most once, and no other"
            return
        if waiting and not decisions and not loads.in_flight.any():
            yield "dispatch left requests waiting though no request runs: it would not be called again"
        for index, decision in decisions:
            errors = list(_check_decision(decision, before))
            yield from errors
            policy.on_assigned(
                waiting[index], 0 if errors else decision.position, None if errors else decision
            )
        waiting = [request for index, request in enumerate(waiting) if index not in indices]


def _check_repetition(make: Callable[[], Policy]) -> Iterator[str]:
    first_run, second_run = (_choose_workers(make(), np.random.default_rng(6)) for _ in range(2))
    if first_run != second_run:
        yield "two runs with the same seed chose different workers: use only `rng`"


def _choose_workers(policy: Policy, rng: np.random.Generator) -> list[tuple[str, int]]:
    chosen: list[tuple[str, int]] = []
    for n in range(_ROUNDS):
        request, loads = _request(f"r{n}", rng), _loads(rng)
        decisions = [(0, policy.select(request, loads, rng))]
        if isinstance(policy, QueuedPolicy):
            decisions += policy.dispatch([replace(request, request_id=f"w{n}")], loads, rng)
        for _, decision in decisions:
            chosen.append((request.request_id, decision.position))
            policy.on_assigned(request, decision.position, decision)
        if n % 3 == 0:
            policy.on_progress({f"r{n // 2}": n})
            policy.on_finished(f"r{n // 2}")
    return chosen
