"""Which workers a request may get."""

from collections.abc import Collection, Mapping

from eldr_serve.scheduling import Loads
from eldr_serve.scheduling.adapters import LoadedAdapters
from eldr_serve.scheduling.ledger import LoadLedger
from eldr_serve.scheduling.types import Lease, LeaseState
from eldr_serve.scheduling.worker_set import WorkerSet
from tests.support.tables import request


def worker_set(
    *names: str | None,
    draining: Collection[str] = (),
    unreachable: Mapping[str, Collection[str]] | None = None,
) -> WorkerSet:
    workers = WorkerSet(LoadLedger(), LoadedAdapters())
    assert workers.update(names, draining, unreachable or {})
    return workers


def available(loads: Loads) -> list[int]:
    return loads.available_positions.tolist()


def test_vacant_draining_and_excluded_workers_are_not_available() -> None:
    workers = worker_set("a", None, "b", "c", draining=["c"])
    assert available(workers.loads()) == [0, 2]
    assert available(workers.loads(["a", "unknown"])) == [2]
    assert workers.worker_loads(None).names == ("a", "b")


def test_a_request_avoids_workers_as_long_as_others_are_available() -> None:
    workers = worker_set("a", "b", unreachable={"partial": ["b"]})

    def positions(*exclude: str, ingress: str = "complete") -> list[int]:
        return available(workers.loads_for(Lease(request(exclude=exclude), LeaseState.SENT, ingress)))

    assert positions() == [0, 1]
    assert positions("a") == [1]
    assert positions("a", "b") == [0, 1]
    assert positions(ingress="partial") == [0]
    assert positions("a", ingress="partial") == [0]  # the ingress cannot reach the other


def test_a_drain_changes_no_position() -> None:
    workers = worker_set("a", "b")
    assert not workers.update(["a", "b"], ["b"], {})
    assert available(workers.loads()) == [0]
    assert workers.update(["a", None], (), {})
    assert workers.positions == {"a": 0}
