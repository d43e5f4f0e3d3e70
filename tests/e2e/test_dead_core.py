"""The process in which a decode engine computes dies alone: its replica lives and reports the death."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil

from tests.e2e.service import Service, core_of, events, pid_of, wait_for


async def test_a_killed_core_ends_its_streams_at_once_and_other_engines_serve_the_rest(
    service: Service, table_file: Path, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    """The replica of the killed core lives and reports its death, so that no request waits for a timeout.

    The stream is seeded, so that no other engine can resume it.
    """
    service.set_policy("round-robin")
    before = service.status()["counters"]
    body = {"model": "eldr-demo", "prompt": "go on and on", "max_tokens": 1500, "ignore_eos": True, "seed": 1}
    received: list[str] = []
    has_begun = asyncio.Event()
    worker: list[str] = []

    async def stream() -> None:
        async with service.post(body | {"stream": True}) as response:
            worker.append(response.headers["x-eldr-decode-worker"])
            async for event in events(response):
                received.append(event)
                if len(received) == 10:
                    has_begun.set()

    def at_the_victim() -> int:
        return sum(w["in_flight"] for w in service.status()["workers"] if w["worker"] == worker[0])

    streamed = asyncio.create_task(stream())
    await has_begun.wait()
    replica = await asyncio.to_thread(pid_of, worker[0])
    core = await asyncio.to_thread(core_of, worker[0])
    os.kill(core, signal.SIGSTOP)  # it accepts requests and answers none, so none has a token
    try:
        # With this salt no engine has the prompts' blocks yet.
        salted = (service.greedy_async(prompt, cache_salt="a core dies") for prompt in prompts)
        asked_for = [asyncio.create_task(answer) for answer in salted]
        while await asyncio.to_thread(at_the_victim) < 2:
            await asyncio.sleep(0.05)
    finally:
        os.kill(core, signal.SIGKILL)
    async with asyncio.timeout(8):  # all timeouts that would also end it are longer
        await streamed
    assert psutil.pid_exists(replica)
    assert received[-1] == "[DONE]"
    assert json.loads(received[-2])["error"]["type"] == "engine_lost"
    assert await asyncio.gather(*asked_for) == single_engine["completions"]

    def since(name: str) -> int:
        return service.counter(name) - before.get(name, 0)

    wait_for(lambda: since("streams_lost") == 1, "the loss is counted", 10)
    assert since("rerouted") > 0
    wait_for(lambda: service.metric("eldr_engine_lost_total") >= 1, "the replica counts the loss too", 20)
