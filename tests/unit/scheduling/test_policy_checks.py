"""Support for authors of policies: import paths, checks, refusals, and tables of declared parameters."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from benchmarks.lib.tables import fill_blocks
from eldr_serve.router.settings import RouterSettings
from eldr_serve.scheduling import (
    Decision,
    Loads,
    PlacementRequest,
    Policy,
    PolicyError,
    QueuedPolicy,
    check_policy,
    make_policy,
    policy_names,
)
from eldr_serve.scheduling.policies.length_predictors import Survival
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from eldr_serve.scheduling.policies.registry import policy_class, reads_counts
from tests.support.fake_router import place_one, router_state
from tests.support.shipped import ROOT
from tests.support.tables import request

PAGE = ROOT / "docs" / "policies.md"
OUTSIDE_MODULE = """
import numpy as np
from pydantic import Field, model_validator
from eldr_serve.scheduling import Decision, NoWorkerError, Policy
from eldr_serve.scheduling.policies.length_predictors import Survival

class Nearest(Policy):
    reads_counts = True

    class Parameters(Policy.Parameters):
        start: int = Field(default=0, ge=0, le=9, description="the worker to begin with")

    def select(self, request, loads, rng):
        workers = loads.available_positions
        if not len(workers):
            raise NoWorkerError("none")
        return Decision(int(workers[self.parameters.start % len(workers)]))

class Late(Survival):
    pass

class Between(Nearest):
    class Parameters(Policy.Parameters):
        low: int = Field(ge=0, description="the first worker")
        high: int = Field(ge=0, description="the last worker")

        @model_validator(mode="after")
        def ordered(self):
            if self.low > self.high:
                raise ValueError("low must not exceed high")
            return self

class Fails(Policy):
    def __init__(self):
        raise RuntimeError("not today")
    def select(self, request, loads, rng): ...
"""


@pytest.fixture
def outside_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Provide a module outside the repository."""
    (tmp_path / "their_rules.py").write_text(OUTSIDE_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "their_rules"
    sys.modules.pop("their_rules", None)


def test_a_policy_outside_the_repository_is_loaded_by_its_import_path(outside_module: str) -> None:
    name = f"{outside_module}:Nearest"
    policy = make_policy(name, start=2)
    assert (policy.name, reads_counts(name), check_policy(type(policy), start=1)) == (name, True, [])
    state = router_state(policy=name, parameters={"start": 1})
    lease = place_one(state, "x")
    assert (lease.worker, lease.reason, lease.policy) == ("r1", name, name)
    assert RouterSettings(policy=name, parameters={"start": 3}).policy == name
    predicts: Any = make_policy("balance-route-horizon", predictor=f"{outside_module}:Late")
    assert isinstance(predicts.length_predictor, Survival)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("their_rules:Nearest", {"start": 10}, "start must be a whole number from 0 to 9, got 10"),
        ("their_rules:Nearest", {"end": 1}, "unknown parameter 'end': there are start"),
        ("their_rules:Nobody", {}, "'their_rules:Nobody' cannot be imported (AttributeError: "),
        ("no_such_rules:X", {}, "cannot be imported (ModuleNotFoundError: No module named 'no_such_rules')"),
        ("their_rules:Late", {}, "'their_rules:Late' is not a subclass of eldr_serve.scheduling.Policy"),
        ("their_rules:Fails", {}, "cannot be created: RuntimeError('not today')"),
        (
            "their_rules:Between",
            {"low": 2},
            "high is missing: policy 'their_rules:Between' needs a whole num",
        ),
        (
            "their_rules:Between",
            {"low": 2, "high": 1},
            "policy 'their_rules:Between': low must not exceed high, got 2",
        ),
        ("nearest", {}, "unknown policy"),
        ("random", {"seed": 1}, "unknown parameter 'seed'"),
        ("locality-band", {"tau": 0.1}, "band"),
        ("marginal-cost", {"cost": {"per_lunch_s": 1.0}}, "cost"),
        ("balance-band", {"predictor": "no_such:X"}, "predictor 'no_such:X' cannot be imported ("),
        (
            "balance-band",
            {"predictor": "json:dumps"},
            "predictor 'json:dumps' is not a class with `predict` and `learn`",
        ),
        ("balance-band", {"predictor": "tea"}, "predictor must be one of survival, prompt-keyed, "),
    ],
)
def test_an_invalid_policy_is_refused_in_one_sentence(
    outside_module: str, name: str, parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PolicyError, match=rf"\A.*{re.escape(sentence)}.*\Z"):  # one line
        make_policy(name, **parameters)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        RouterSettings(policy=name, parameters=parameters)


HUGE = (2**31, 2**63, 10**30)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "parameter", "values"),
    [
        ("balance-route", "slots", [0, 1.5, True, "8", None, *HUGE]),
        ("balance-route", "candidates", [0, 13, 2.0, *HUGE]),
        ("balance-route", "threshold", [-1, 0.5, *HUGE]),
        ("balance-route", "max_overtakes", [0, None, *HUGE]),
        ("balance-route", "overcommit", [-1, *HUGE]),
        ("balance-route", "lookahead", [0, *HUGE]),
        ("balance-route", "queue", [1]),
        ("balance-route-horizon", "alpha", [-1, NAN, "x"]),
        ("balance-route-horizon", "beta", [0, None]),
        ("balance-route-horizon", "gamma", [0, 1.1]),
        ("balance-route-horizon", "horizon", [0, 1001, 2.5]),
        ("balance-route-horizon", "predictor", ["oracle", None, [], "nowhere:Predictor"]),
        ("balance-route-horizon", "refresh", [0, "5", 2**63]),
        ("balance-route-horizon", "gate", [-0.1, 1.1]),
        ("balance-route-horizon", "new_requests_end", [1, None]),
        ("balance-route-horizon", "count_down_from_horizon", [1, None]),
        ("balance-band", "lookahead", [0, None]),
        ("balance-band", "band_tokens", [-1, "wide", NAN, INF, 10**400]),
        ("domain", "mix", [{}, {"code": 0}, {"code": -1.0}, {"code": "x"}, 3]),
        ("locality-band", "band", [-0.1, "wide", True, NAN]),
        ("locality-band", "max_load_ratio", [0.5, INF, 10**400]),
        ("marginal-cost", "affinity", [-0.1, 10**400]),
        ("marginal-cost", "tail_power", [0.9, 32.1, NAN, "2", None]),
        ("marginal-cost", "cost", [{"fixed_s": -1}, {"fixed_s": NAN}, 3, {"per_step_s": 10**400}]),
    ],
)
def test_a_wrong_parameter_is_refused_in_one_sentence(name: str, parameter: str, values: Any) -> None:
    for value in values:
        with pytest.raises(PolicyError, match=rf"\A{parameter} (must|is|'.*' cannot) .*\Z"):
            make_policy(name, **{parameter: value})


@pytest.mark.parametrize("name", policy_names())
def test_our_policies_pass_the_checks(name: str) -> None:
    assert check_policy(policy_class(name)) == []


class _IgnoresAvailability(Policy):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(0, reason="first")


class _ChangesLoads(_IgnoresAvailability):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        worker = int(np.flatnonzero(loads.available)[0])
        loads.in_flight[worker] += 1
        return Decision(worker, reason="greedy")


class _UsesOwnRandomness(Policy):
    _rng = np.random.default_rng()

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(self._rng.choice(loads.available_positions)), reason="moody")


class _FailsForUnknownRequests(MarginalCost):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        assert request.expert_counts is not None
        return super().select(request, loads, rng)

    def on_finished(self, request_id: str) -> None:
        del self.activation.running[request_id]


class _NeedsLabel(_IgnoresAvailability):
    label = "team"

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.available_positions[0]), reason=request.labels[self.label])


class _NeedsEveryLabel(_NeedsLabel):
    label = "kind"


class _NeverDispatches(QueuedPolicy):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(int(loads.available_positions[0]), reason="now")

    def dispatch(self, waiting: Any, loads: Loads, rng: np.random.Generator) -> list[tuple[int, Decision]]:
        return []


class _DispatchesTwice(_NeverDispatches):
    def dispatch(self, waiting: Any, loads: Loads, rng: np.random.Generator) -> list[tuple[int, Decision]]:
        return [(0, self.select(waiting[0], loads, rng))] * 2 if waiting else []


class _HasUnserialisableParameter(_NeverDispatches):
    class Parameters(QueuedPolicy.Parameters):
        start: Any = Field(default_factory=object)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (_IgnoresAvailability, "it chose a worker that is not available"),
        (_IgnoresAvailability, "select must raise NoWorkerError if no worker is available"),
        (_ChangesLoads, "select changed the loads, which belong to the caller"),
        (_UsesOwnRandomness, "two runs with the same seed chose different workers: use only `rng`"),
        (_FailsForUnknownRequests, "requests without usable counts: it raised AssertionError"),
        (_NeedsLabel, "select: it raised KeyError('team')"),
        (_NeedsEveryLabel, "requests without usable counts: it raised KeyError('kind')"),
        (_FailsForUnknownRequests, "notifications: it raised KeyError('nobody')"),
        (_NeverDispatches, "dispatch left requests waiting though no request runs"),
        (_DispatchesTwice, "dispatch must give each index into `waiting` at most once, and no other"),
        (_HasUnserialisableParameter, "parameters: it raised PydanticSerializationError"),
    ],
)
def test_the_violations_of_a_policy_are_reported(broken: type[Policy], sentence: str) -> None:
    assert any(sentence in found for found in check_policy(broken))


def test_the_policy_on_the_page_passes_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, label_code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)
    (tmp_path / "from_the_page.py").write_text(code + label_code)
    monkeypatch.syspath_prepend(tmp_path)
    policy = make_policy("from_the_page:Packed", slots=4)
    assert check_policy(type(policy), slots=4) == []
    assert policy.select(request(), Loads.from_counts([1, 3, 4]), np.random.default_rng()).position == 1
    policy = make_policy("from_the_page:Reserved", reserved=2)
    assert check_policy(type(policy), reserved=2) == []
    loads = Loads.from_counts([3, 2, 1, 0])
    for labels, position in (({"team": "search"}, 1), ({"team": "ads"}, 3), ({}, 3)):
        assert policy.select(request(labels=labels), loads, np.random.default_rng()).position == position


def test_the_page_lists_the_declared_parameters() -> None:
    page = PAGE.read_text()
    assert page.count("<!-- parameters ") >= 5
    assert fill_blocks(page) == page, "run: make tables"
