"""More requests than slots: prefilled requests wait in the decode queue, over real engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.e2e.service import GREEDY, QUEUE_TIMEOUT_S, Service, until, wait_for

LONG = {"model": "eldr-demo", "max_tokens": 1500, "stream": True, "ignore_eos": True}


def queue_size(service: Service) -> int:
    return service.status()["decode_queue"]["size"]


async def long_answer(service: Service, number: int) -> httpx.Response:
    """Send a request that occupies its worker for seconds, and return the answer without its body."""
    prompt = f"{number} a long story about a prefill engine " * 30
    async with service.post(LONG | {"prompt": prompt}) as response:
        async for _ in response.aiter_bytes():
            pass
        return response


@asynccontextmanager
async def crowd(service: Service, requests: int) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Give each worker one slot and send `requests` long requests. Clients disconnect when the block ends."""
    await asyncio.to_thread(service.set_policy, "balance-route-horizon", slots=1)
    tasks = [asyncio.create_task(long_answer(service, number)) for number in range(requests)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("policy", "parameters", "has_queue"),
    [("balance-band", {"slots": 2}, True), ("marginal-cost", {}, False)],
)
async def test_greedy_answers_under_more_requests_than_slots_equal_the_single_engine(
    policy: str,
    parameters: dict[str, int],
    has_queue: bool,
    service: Service,
    prompts: list[str],
    single_engine: dict[str, list[str]],
) -> None:
    service.set_policy(policy, **parameters)
    before, most = service.counter("queued"), 0

    async def chat(prompt: str) -> str:
        stream = await service.async_client.chat.completions.create(
            model="eldr-demo", messages=[{"role": "user", "content": prompt}], stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def watch() -> None:
        nonlocal most
        while True:
            status = await asyncio.to_thread(service.status)
            most = max(most, *(worker["in_flight"] for worker in status["workers"]))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    completions, chats = await asyncio.gather(
        asyncio.gather(*map(service.greedy_async, prompts)), asyncio.gather(*map(chat, prompts))
    )
    watching.cancel()
    assert completions == single_engine["completions"]
    assert chats == single_engine["chats"]
    assert (service.counter("queued") > before) == has_queue
    if has_queue:
        assert 1 <= most <= parameters["slots"]


async def test_a_client_that_leaves_the_queue_frees_its_prompts_blocks(service: Service) -> None:
    def prefill_kv_usage() -> float:
        (usage,) = service.status()["ingress"]["prefill_kv_usage"].values()
        return float(usage)

    async with crowd(service, 8) as clients:
        await until(lambda: queue_size(service) == 6, "six requests wait")
        await until(lambda: prefill_kv_usage() > 0, "their blocks are held")
        for client in clients[2:]:
            client.cancel()
        # The policy decides which two of the eight have workers: some of the six may, too.
        await until(lambda: queue_size(service) == 0, "the queue is empty")
    wait_for(lambda: service.status()["leases"] == 0, "leases are released", 10)
    # An unreleased prompt would stay for 30 s.
    wait_for(lambda: prefill_kv_usage() == 0.0, "the prefill engine is empty", 10)
    service.wait_empty()


async def test_a_request_that_waits_too_long_gets_503_with_retry_after(service: Service) -> None:
    before = service.counter("queue_expired")
    async with crowd(service, 14) as clients:
        started = asyncio.get_running_loop().time()
        done: set[asyncio.Task[httpx.Response]] = set()
        while not (refused := [t.result() for t in done if t.result().status_code != 200]):
            done, _ = await asyncio.wait([c for c in clients if c not in done], return_when="FIRST_COMPLETED")
        assert asyncio.get_running_loop().time() - started >= QUEUE_TIMEOUT_S
        assert refused[0].status_code == 503
        assert int(refused[0].headers["retry-after"]) >= 1
        await until(lambda: service.counter("queue_expired") > before, "the expired request is counted")
    wait_for(lambda: service.status()["leases"] == 0, "leases are released", 10)
    # A client that leaves just as it gets a worker may hold blocks until its lease ends; an engine would hold
    # leaked blocks forever.
    service.wait_empty(40)


async def test_a_change_to_a_policy_without_queue_starts_all_queued_requests(service: Service) -> None:
    async with crowd(service, 5):
        await until(lambda: queue_size(service) == 3, "three requests wait")
        await asyncio.to_thread(service.set_policy, "shortest-queue")
        await until(lambda: queue_size(service) == 0 and service.status()["leases"] == 5, "all five run", 5)


async def test_queued_requests_survive_the_death_of_the_router(service: Service) -> None:
    import ray

    from eldr_serve.actors import find_actor
    from eldr_serve.router.actor import actor_name

    async with crowd(service, 5) as clients:
        await until(lambda: queue_size(service) == 3, "three requests wait")
        ray.kill(find_actor(actor_name("eldr")), no_restart=False)
        await until(lambda: service.status().get("leases") == 5, "no request waits for a dead router")
        assert not [client for client in clients if client.done() and client.result().status_code != 200]


def test_the_queue_is_in_the_metrics(service: Service) -> None:
    wait_for(lambda: service.metric("eldr_decode_queue_wait_seconds_count") > 0, "waits are exported", 40)
    assert "ray_eldr_decode_queue_size{" in service.metrics()
