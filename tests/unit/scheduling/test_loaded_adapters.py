"""The adapters that workers have loaded, and the cost of loading one."""

from dataclasses import replace
from typing import Any

import numpy as np

from eldr_serve.scheduling import Decision, Loads, PlacementRequest, Policy, StepCost, make_policy
from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.tables import fail, request

WORKERS = ["w0", None, "w1"]


def test_a_worker_keeps_the_adapters_that_were_used_last() -> None:
    adapters = LoadedAdapters(["a", "b", "c"], 2)
    assert [adapters.lacks_adapter(WORKERS, name).all() for name in "abc"] == [True, False, False]
    adapters.record_request("w0", "a")
    adapters.record_request("w0", "")
    adapters.record_request("w0", "c")
    assert [adapters.lacks_adapter(WORKERS, name).tolist() for name in "ab"] == [
        [False, True, True],
        [True, False, False],
    ]
    adapters.keep_only(["w1"])  # w0 has restarted, with the adapters of its start
    assert adapters.lacks_adapter(["w0"], "a").tolist() == [True]


def test_nothing_is_loaded_again_if_all_adapters_fit() -> None:
    adapters = LoadedAdapters(["a", "b"], 2)
    for name in "abba":
        adapters.record_request("w0", name)
        assert not any(adapters.lacks_adapter(WORKERS, other).any() for other in "ab")


class _WithAdapter(Policy):
    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        assert (loads.lacks_adapter is None) is not bool(request.adapter)
        return Decision(0 if loads.lacks_adapter is None else int(loads.lacks_adapter.argmin()))


def test_policies_see_which_workers_lack_the_adapter() -> None:
    placer = Placer(_WithAdapter(), on_policy_error=fail, adapters=LoadedAdapters(["a", "b"], 1))
    placer.set_workers(["w0", "w1"])
    held = Lease(request("held", adapter="a"), LeaseState.GRANTED, worker="w1")
    placer.adopt_lease(held)

    def place(name: str, adapter: str = "") -> str:
        (lease,) = placer.submit([Lease(request(name, adapter=adapter), LeaseState.SENT)])
        return lease.worker

    assert [place("1"), place("2", "a"), place("3", "b")] == ["w0", "w1", "w0"]
    placer.set_workers(["w0", "new"])
    assert place("4", "b") == "w0"


def test_the_time_of_loading_an_adapter_is_divided_by_the_steps_of_the_answer() -> None:
    cost = StepCost(2e-3, 1e-4, 1e-7, 5e-5)
    policy: Any = make_policy(
        "marginal-cost", affinity=0.0, cost=cost.as_dict(), tail_power=1, adapter_load_s=0.5
    )
    newcomer = PlacementRequest("new", 8, 10, expert_counts=np.ones((2, 4), np.uint32), adapter="a")
    loads = Loads.from_counts([0, 1, 3], [0, 8, 24])
    added = policy.added_cost(newcomer, replace(loads, lacks_adapter=np.array([True, False, True])))
    np.testing.assert_allclose(added - policy.added_cost(newcomer, loads), [0.05, 0.0, 0.2])
