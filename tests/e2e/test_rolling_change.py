"""Engines scale up and down and the whole application is redeployed without any effect on clients."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.applications import arguments_of, deploy, running
from tests.e2e.service import Service, events, until

NAME = "rolling"
CROWD, FEW = 9, 2  # concurrent streams: more than one engine should have, and few enough for one
TOKENS = 120  # tokens of a stream
NEW = "shortest-queue"  # policy of the new deployment
AT_ONCE = 4 * CROWD  # placements within which a new engine must have got one
# Above three requests in flight, Serve soon starts a second engine.
_SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 3,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
}


@dataclass
class Rolling:
    """The running application, with redeployment."""

    service: Service
    arguments: dict[str, Any]

    def deploy(self, **changes: Any) -> None:
        deploy(NAME, self.arguments | changes, wait=False)

    def status(self) -> dict[str, Any]:
        """Return the status, which is empty while the answering ingress does not reach the router."""
        try:
            status = self.service.status()
        except httpx.TransportError:  # the ingress has just stopped
            return {}
        return status if "workers" in status else {}

    def replaced(self, old: set[str]) -> bool:
        """Return whether two warm decode engines, none of them old, run under the new policy."""
        status = self.status()
        now = {worker["worker"] for worker in status.get("workers", [])}
        return len(now) == 2 and not now & old and status["policy"] == NEW and status["ingress"]["all_warm"]

    def decodes(self) -> set[str]:
        """Return the ids of the replicas that get requests."""
        return {worker["worker"] for worker in self.status().get("workers", [])}


@pytest.fixture(scope="module")
def rolling(ray_cluster: str) -> Iterator[Rolling]:
    """Yield the application of deployments/cpu_demo.yaml with two ingresses and one or two decode engines."""
    arguments = arguments_of("cpu_demo.yaml", stop_wait_s=2.0)  # Serve's default
    engines = arguments["decode_config"]["deployment_config"]
    del engines["num_replicas"]
    engines["autoscaling_config"] = _SCALING
    arguments["ingress_deployment_config"] |= {"num_replicas": 2}
    with running(NAME, arguments) as service:
        yield Rolling(service, arguments)


@dataclass(frozen=True)
class Answer:
    """A client's complete answer, its engine, and when the request was sent."""

    prompt: str
    text: str
    worker: str
    sent_s: float


async def stream(service: Service, prompt: str) -> Answer:
    body = {
        "model": "eldr-demo",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent_s = time.monotonic()
    # One connection each, so that all ingresses get some.
    async with service.post(body) as response:
        assert response.status_code == 200, await response.aread()
        *parts, end = [data async for data in events(response)]
    assert end == "[DONE]", end
    assert not [part for part in parts if '"error"' in part]
    text = "".join(json.loads(part)["choices"][0]["text"] for part in parts)
    return Answer(prompt, text, response.headers["x-eldr-decode-worker"], sent_s)


@dataclass
class StreamLoad:
    """A fixed number of clients that stream one answer after another."""

    service: Service
    prompts: list[str]
    answers: list[Answer] = field(default_factory=list)

    @asynccontextmanager
    async def run_clients(self, clients: int) -> AsyncIterator[None]:
        """Run this many clients during the block. Then each finishes its current answer."""
        ended = asyncio.Event()

        async def client(number: int) -> None:
            rng = random.Random(number)
            while not ended.is_set():
                self.answers.append(await stream(self.service, rng.choice(self.prompts)))

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))
            yield
            ended.set()


@pytest.mark.faults
async def test_scaling_and_redeployment_do_not_affect_clients(rolling: Rolling, prompts: list[str]) -> None:
    """Scale from one decode engine to two under load, redeploy, and scale back to one."""
    service = rolling.service
    expected = {prompt: (await stream(service, prompt)).text for prompt in prompts}
    first = rolling.decodes()
    assert len(first) == 1
    load = StreamLoad(service, prompts)
    async with load.run_clients(CROWD):
        await until(lambda: len(rolling.decodes()) == 2, "there is a second decode engine", 200)
        came_s, newcomers = time.monotonic(), rolling.decodes() - first

        def asked_since() -> list[Answer]:
            return [answer for answer in load.answers if answer.sent_s > came_s]

        await until(lambda: len(asked_since()) >= AT_ONCE, "requests come after the new engine", 120)
        assert newcomers & {answer.worker for answer in asked_since()[:AT_ONCE]}
        old = rolling.decodes()
        rolling.deploy(router={"policy": NEW}, path={"retry_backoff_s": 0.06})
        await until(lambda: rolling.replaced(old), "all engines are of the new deployment", 300)
    async with load.run_clients(FEW):
        await until(lambda: len(rolling.decodes()) == 1, "Serve has stopped all decode engines but one", 120)

    assert len(load.answers) > 3 * CROWD
    assert [answer for answer in load.answers if answer.text != expected[answer.prompt]] == []
    after = rolling.status()
    assert after["counters"].get("streams_lost", 0) == 0
    await until(lambda: rolling.status().get("leases") == 0, "all leases are released", 30)
