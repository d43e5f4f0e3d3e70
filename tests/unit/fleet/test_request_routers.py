"""Request routers choose a replica for any call. Without one Serve would never send the call."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import ReplicaID, RequestRouter

from eldr_serve.engine.calls import REPLICA_KEY
from eldr_serve.fleet.directory import get_directory
from eldr_serve.fleet.replica_publisher import ReplicaPublisher
from eldr_serve.integrations.decode_request_router import DecodeRequestRouter

ID = DeploymentID("d")


def replica(name: str, **fields: Any) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, ID), routing_stats={}, replica_metadata={}, **fields)


REPLICAS = [replica("a"), replica("b")]


def router(kind: Any, **kwargs: Any) -> Any:
    request_router = kind(ID, DeploymentHandleSource.UNKNOWN)
    request_router.initialize_state(directory_name=f"test-{kind.__name__}", **kwargs)
    return request_router


def leasing_router(place: Any) -> Any:
    """Return a DecodeRequestRouter whose client places by this function."""
    client = Mock(place=AsyncMock(side_effect=place))
    with patch("eldr_serve.integrations.decode_request_router.RouterClient", return_value=client):
        return router(DecodeRequestRouter, router_name="r")


def call(request: Any, number: int = 0) -> Any:
    return SimpleNamespace(args=[request], metadata=SimpleNamespace(internal_request_id=str(number)))


async def choose_replica(routing: Any, request: Any, number: int = 0) -> str:
    """Return the name of the replica that is chosen for the request."""
    ((replica,),) = await routing.choose_replicas(REPLICAS, call(request, number))
    return replica.replica_id.unique_id


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": "boom"},
        {"kv_transfer_params": ["boom"]},
        {"kv_transfer_params": {"remote_num_tokens": "boom"}},
        {"kv_transfer_params": {"remote_num_tokens": 10**30}, "max_tokens": 10**30},
        {"kv_transfer_params": {"eldr_expert_counts": 5}, "max_tokens": "boom"},
        {"kv_transfer_params": {REPLICA_KEY: ["b"]}},
        {"request_id": 5},
    ],
)
async def test_any_call_gets_a_replica_and_calls_are_spread(fields: dict[str, Any]) -> None:
    routing = leasing_router(OverflowError)  # every placement fails
    assert {await choose_replica(routing, SimpleNamespace(**fields), number) for number in range(2)} == {
        "a",
        "b",
    }


def test_equally_loaded_replicas_are_chosen_randomly() -> None:
    routing = leasing_router(lambda *args: None)
    assert {routing._least_loaded(REPLICAS).replica_id.unique_id for _ in range(64)} == {"a", "b"}
    routing._in_flight["a"] = 1
    assert {routing._least_loaded(REPLICAS).replica_id.unique_id for _ in range(64)} == {"b"}


async def test_a_call_with_an_address_goes_to_that_replica() -> None:
    routing = leasing_router(OverflowError)
    for name in ("b", "a", "b"):
        assert await choose_replica(routing, SimpleNamespace(kv_transfer_params={REPLICA_KEY: name})) == name
    assert await routing.choose_replicas([], call(None)) == []
    assert len(await routing.choose_replicas(REPLICAS, None)) == 1


async def test_a_policy_gets_the_domain_and_the_labels_that_headers_name() -> None:
    requests: list[Any] = []

    def place(request: Any, counts: Any) -> Any:
        requests.append(request)
        return SimpleNamespace(worker="b")

    routing = leasing_router(place)
    for number, headers in enumerate(
        (None, {}, {"x-eldr-domain": "fran%C3%A7ais", "x-eldr-label-a": "b%20c"})
    ):
        pending = call(SimpleNamespace(kv_transfer_params={"remote_num_tokens": 7}), number)
        if headers is not None:
            pending.args.append(SimpleNamespace(headers=headers))
        await routing.choose_replicas(REPLICAS, pending)
    assert [request.domain for request in requests] == [None, None, "français"]
    assert [request.labels for request in requests] == [{}, {}, {"a": "b c"}]


async def test_a_retried_call_reads_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """The first replica may have read them before it was lost, and read blocks are freed."""
    routing = leasing_router(lambda request, counts: SimpleNamespace(worker="b"))
    request = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True})
    assert await choose_replica(routing, request, 1) == "b"
    with patch.object(RequestRouter, "on_replica_actor_unavailable"):
        routing.on_replica_actor_unavailable(ReplicaID("b", ID))
    await choose_replica(routing, request, 1)
    assert request.kv_transfer_params is None
    assert "request 1 is retried, since replica b was lost" in caplog.text


def test_a_process_learns_its_live_replicas_and_their_metadata() -> None:
    routing = router(ReplicaPublisher)
    live = get_directory("test-ReplicaPublisher")
    changes = []
    live.watch(lambda: changes.append(live.known_workers))
    b = replica("b")
    b.replica_metadata = {"where": 1}
    with patch.object(RequestRouter, "update_replicas"), patch.object(RequestRouter, "on_replica_actor_died"):
        routing.update_replicas([b, replica("a")])
        routing.on_replica_actor_died(ReplicaID("a", ID))
    assert changes == [(), ("a", "b"), ("b",)]
    assert live.metadata == {"b": {"where": 1}}
