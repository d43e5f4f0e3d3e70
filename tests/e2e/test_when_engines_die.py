"""What clients see when something fails, and what must not be left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from service import Service, wait_for


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 1.0])
async def test_a_client_that_leaves_takes_its_lease_and_kv_along(
    service: Service, table_file: Path, after_s: float
) -> None:
    """Before, during and after the hand-over: nobody waits for the 30 s lease of the prefill engine."""
    prompt = "a long story about a prefill engine " * 60
    body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}

    async def leave(number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            request = client.stream(
                "POST", f"{service.url}/v1/completions", json=body | {"prompt": f"{number} {prompt}"}
            )
            try:
                async with asyncio.timeout(after_s), request as response:
                    async for _ in response.aiter_bytes():
                        pass
            except TimeoutError:
                pass

    await asyncio.gather(*(leave(number) for number in range(6)))
    wait_for(lambda: service.status()["leases"] == 0, "leases are released", 10)
    wait_for(lambda: service.status()["ingress"]["in_flight"] == 0, "no request is left in the ingress", 10)
    service.wait_empty()


def elsewhere(counters: dict[str, int]) -> int:
    """Requests that were served by another replica than their first one."""
    return counters.get("rerouted", 0)


async def test_the_router_may_die_in_mid_traffic(
    service: Service, table_file: Path, prompts: list[str]
) -> None:
    import ray

    from eldr_serve.serving.decode_router import actor_name, find

    service.set_policy("locality-band", band=0.05)
    before = service.status()
    client = service.async_client

    async def ask(number: int) -> int:
        await asyncio.sleep(0.05 * number)
        answer = await client.completions.create(
            model="eldr-demo",
            prompt=prompts[number % len(prompts)],
            max_tokens=30,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    async def kill() -> None:
        await asyncio.sleep(1.0)
        ray.kill(find(actor_name("eldr")), no_restart=False)

    *tokens, _ = await asyncio.gather(*(ask(number) for number in range(60)), kill())
    assert tokens == [30] * 60
    # A new actor may answer before the ingress has met it and told it what the old one knew.
    wait_for(
        lambda: service.status().get("settings_version") == before["settings_version"], "the router is back"
    )
    after = service.status()
    assert after["epoch"] != before["epoch"]
    # Policy and table are those that an operator had set, not those of the deployment's YAML.
    assert (after["policy"], after["parameters"]) == (before["policy"], before["parameters"])
    assert after["table"] == before["table"]
    assert {w["replica"] for w in after["workers"]} == {w["replica"] for w in before["workers"]}


def test_a_decode_engine_that_dies_before_its_first_token_costs_nobody_an_answer(
    service: Service, table_file: Path, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    """Requests are sent to a replica while its process is stopped, and then it is killed.

    Whoever serves them in its place gives the answers of an undisturbed engine.
    """
    import ray
    from ray.util.state import list_actors

    service.set_policy("round-robin")
    victim = service.status()["workers"][0]["replica"]
    actor = next(a for a in list_actors(filters=[("state", "=", "ALIVE")]) if victim in (a.name or ""))
    # Stopped, the replica takes requests and never answers: they are all before their first token.
    os.kill(actor.pid, signal.SIGSTOP)

    async def traffic() -> list[str]:
        client = service.async_client

        async def ask(prompt: str) -> str:
            answer = await client.completions.create(
                model="eldr-demo",
                prompt=prompt,
                max_tokens=24,
                temperature=0,
                extra_body={"cache_salt": "survive"},  # no engine has these blocks yet
            )
            return answer.choices[0].text

        async def kill() -> None:
            await asyncio.sleep(2.0)
            ray.kill(ray.get_actor(actor.name, namespace="serve"))

        *texts, _ = await asyncio.gather(*map(ask, prompts), kill())
        return list(texts)

    before = service.status()["counters"]
    assert asyncio.run(traffic()) == single_engine["completions"]
    # Serve sends a call that its replica had not yet accepted to another one, and we correct the lease;
    # a call that had been accepted we place again ourselves.
    wait_for(
        lambda: elsewhere(service.status()["counters"]) > elsewhere(before), "requests went elsewhere", 10
    )
    # Each at least once, and once more at most for each try of decode.
    prefills = service.status()["counters"]["prefills"] - before["prefills"]
    assert len(prompts) <= prefills <= 3 * len(prompts)
    wait_for(lambda: len(service.status()["workers"]) == 2, "Serve has started another decode replica", 240)
    wait_for(lambda: service.status()["ingress"]["ready"], "the new replica is warm", 120)
    # The newcomer has taken the place, and with it the centroid, of the one that died.
    assert victim not in {w["replica"] for w in service.status()["workers"]}
    answer = service.client.completions.create(model="eldr-demo", prompt="after all", max_tokens=5)
    assert answer.usage is not None


async def test_a_decode_engine_lost_in_mid_stream_ends_the_stream_with_an_error(
    service: Service, table_file: Path
) -> None:
    import ray
    from ray.util.state import list_actors

    lost = service.status()["counters"].get("streams_lost", 0)
    body = {
        "model": "eldr-demo",
        "prompt": "go on and on",
        "max_tokens": 1500,
        "stream": True,
        "ignore_eos": True,
    }
    events: list[str] = []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{service.url}/v1/completions", json=body) as response,
    ):
        victim = response.headers["x-eldr-decode-worker"]
        async for line in response.aiter_lines():
            events.append(line)
            if len(events) == 10:
                name = next(
                    a.name for a in list_actors(filters=[("state", "=", "ALIVE")]) if victim in (a.name or "")
                )
                started = time.monotonic()
                ray.kill(ray.get_actor(name, namespace="serve"))
    assert time.monotonic() - started < 15
    data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["error"]["type"] == "engine_lost"
    wait_for(
        lambda: service.status()["counters"].get("streams_lost", 0) == lost + 1, "the loss is counted", 10
    )
