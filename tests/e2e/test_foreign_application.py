"""DecodeRequestRouter alone, in an application without our ingress and engines."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from eldr_serve.actors import find_actor
from eldr_serve.experts.signature import pack_counts
from eldr_serve.router.actor import actor_name
from tests.e2e.service import STOP_WAIT_S, wait_for
from tests.support.tables import counts_for, unit_table


@pytest.fixture
def other(ray_cluster: str) -> Any:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    class Other:
        async def generate(self, request: Any) -> str:
            replica: str = serve.get_replica_context().replica_id.unique_id
            return replica

    router = RequestRouterConfig(
        request_router_class="eldr_serve.integrations.decode_request_router.DecodeRequestRouter",
        request_router_kwargs={
            "directory_name": "other",
            "router_name": actor_name("other"),
            "router_spec": {"model_id": "m", "policy": "locality-band", "parameters": {"band": 0.0}},
        },
    )
    deployment = serve.deployment(
        Other,
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_wait_loop_s=STOP_WAIT_S,
        request_router_config=router,
    )
    yield serve.run(deployment.bind(), name="other", route_prefix=None)
    serve.delete("other")


async def test_a_signature_selects_its_replica_and_the_lease_ends_with_the_call(other: Any) -> None:
    import ray

    def request(centroid: int | None) -> Any:
        params = {} if centroid is None else {"eldr_expert_counts": pack_counts(counts_for(centroid))}
        return SimpleNamespace(max_tokens=5, kv_transfer_params=params | {"remote_num_tokens": 7})

    await other.generate.remote(request(0))  # this starts the router actor and reports the replicas to it
    router = find_actor(actor_name("other"))
    wait_for(lambda: len(ray.get(router.status.remote())["workers"]) == 2, "the router has both replicas")
    ray.get(router.swap_table.remote(unit_table(2).to_bytes()))
    # Calls use local fallback while the actor starts, until the client has connected again and has the table.
    async with asyncio.timeout(30):
        while not ray.get(router.status.remote())["counters"].get("reason:locality-band"):
            await other.generate.remote(request(0))
            await asyncio.sleep(0.05)
    replicas = [worker["worker"] for worker in ray.get(router.status.remote())["workers"]]
    for centroid in (0, 1, 1, 0):
        assert await other.generate.remote(request(centroid)) == replicas[centroid]
    assert await other.generate.remote(SimpleNamespace()) in replicas  # a call of another kind
    status = ray.get(router.status.remote())
    assert status["counters"]["reason:locality-band"] >= 4
    wait_for(lambda: ray.get(router.status.remote())["leases"] == 0, "leases end with their calls")
