"""Results for clients when something fails, and resources that must be freed."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx

from loadgen import application, processes
from tests.e2e.service import Service, until, wait_for


async def test_disconnecting_clients_free_their_leases_and_kv(service: Service, table_file: Path) -> None:
    """Before, during and after the hand-over, blocks are freed before the prefill engine's lease of 30 s."""
    prompt = "a long story about a prefill engine " * 60
    body = {"model": "eldr-demo", "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}

    async def leave(number: int, after_s: float) -> None:
        own_body = body | {"prompt": f"{number} after {after_s} {prompt}"}
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            request = client.stream("POST", f"{service.url}/v1/completions", json=own_body)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s), request as response:
                    await response.aread()

    for after_s in (0.0, 0.05, 0.3, 1.0):  # s; in all far less than the lease
        await asyncio.gather(*(leave(number, after_s) for number in range(6)))
    wait_for(lambda: service.status()["leases"] == 0, "leases are released", 10)
    wait_for(lambda: service.status()["ingress"]["in_flight"] == 0, "no request is left in the ingress", 10)
    service.wait_empty()


async def test_traffic_survives_the_death_of_the_router(
    service: Service, table_file: Path, prompts: list[str]
) -> None:
    import ray

    from eldr_serve.actors import find_actor
    from eldr_serve.router.actor import actor_name

    service.set_policy("locality-band", band=0.05)
    before, client = service.status(), service.async_client

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
        ray.kill(find_actor(actor_name("eldr")), no_restart=False)

    *tokens, _ = await asyncio.gather(*(ask(number) for number in range(60)), kill())
    assert tokens == [30] * 60
    # A new actor may answer before the ingress has connected and restored its state.
    wait_for(
        lambda: service.status().get("settings_version") == before["settings_version"], "the router is back"
    )
    after = service.status()
    assert after["epoch"] != before["epoch"]
    # Policy and table are those set by the operator, not those of the deployment's YAML.
    assert (after["policy"], after["parameters"]) == (before["policy"], before["parameters"])
    assert after["table"] == before["table"]
    assert service.decodes() == {w["worker"] for w in before["workers"]}


async def test_a_dead_controller_ends_no_engine(
    service: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    """Serve's next controller queries all replicas, and keeps those that answer."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    (controller,) = processes.find_processes("ray::ServeController")
    before = service.decodes(), set(service.status()["ingress"]["prefill_in_flight"])
    over = asyncio.Event()

    async def ask(prompt: str) -> list[str]:
        texts = []
        while not over.is_set():
            texts.append(await service.greedy_async(prompt))
        return texts

    def back() -> bool:
        with contextlib.suppress(RayError, RayServeException, ConnectionError, TimeoutError):
            return controller.pid not in {
                p.pid for p in processes.find_processes("ray::ServeController")
            } and (application.all_replicas_running())
        return False

    answers = [asyncio.create_task(ask(prompt)) for prompt in prompts[:4]]
    await asyncio.to_thread(processes.kill, controller)
    await until(back, "Serve has a controller with all replicas", 60)
    await asyncio.sleep(5)  # an unknown replica would be stopping by now
    over.set()
    assert [set(texts) for texts in await asyncio.gather(*answers)] == [
        {text} for text in single_engine["completions"][:4]
    ]
    assert (service.decodes(), set(service.status()["ingress"]["prefill_in_flight"])) == before
    assert application.all_replicas_running()


async def test_a_decode_engine_that_dies_before_its_first_token_loses_no_answer(
    service: Service, table_file: Path, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    """Requests are sent to a replica while its process is stopped, and then it is killed.

    The replicas that serve them instead give the answers of an undisturbed engine.
    """
    import ray
    from ray.util.state import list_actors

    service.set_policy("round-robin")
    prefills_before, rerouted_before = service.settled_counters("prefills", "rerouted", constant_s=3.0)
    victim = service.status()["workers"][0]["worker"]
    actor = next(a for a in list_actors(filters=[("state", "=", "ALIVE")]) if victim in (a.name or ""))
    # Stopped, the replica takes requests and never answers: none of them has a token yet.
    os.kill(actor.pid, signal.SIGSTOP)

    async def kill() -> None:
        await asyncio.sleep(2.0)
        ray.kill(ray.get_actor(actor.name, namespace="serve"))

    # With this salt no engine has the prompts' blocks yet.
    answers = (service.greedy_async(prompt, cache_salt="survive") for prompt in prompts)
    *texts, _ = await asyncio.gather(*answers, kill())
    assert texts == single_engine["completions"]
    # If the replica had not accepted a call, Serve sends it to another replica and we update its lease. If it
    # had, we place the call again.
    wait_for(lambda: service.counter("rerouted") > rerouted_before, "another engine gets the requests", 10)
    # Each at least once, and at most once more for each decode attempt.
    prefills = service.counter("prefills") - prefills_before
    assert len(prompts) <= prefills <= 3 * len(prompts)
    wait_for(lambda: victim not in service.decodes(), "the dead replica gets no more calls", 30)
    # The next test of the demo waits until Serve has started another replica.
    assert service.complete("after all", max_tokens=5).usage is not None
