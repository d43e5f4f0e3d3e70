"""An operator drains a decode worker under load: it is soon empty, and no answer changes.

The worker stays drained, so this file is the last one that uses the demo's engines.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.e2e.service import Service, events, until

STREAMS = 32  # half of them at each worker
LONG = {"model": "eldr-demo", "temperature": 0, "max_tokens": 300, "ignore_eos": True, "stream": True}


async def read_stream(service: Service, prompt: str, received: list[str]) -> str:
    """Return the text of a stream. Append its events to `received` as they arrive."""
    async with service.post(LONG | {"prompt": prompt}) as response:
        assert response.status_code == 200
        async for event in events(response):
            received.append(event)
    *parts, end = received
    assert end == "[DONE]"
    assert len({json.loads(part)["id"] for part in parts}) == 1
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts)


def in_flight(service: Service, replica: str) -> int:
    """Drain a replica, again if it is drained already, and return the number of its calls."""
    answer = service.admin("PUT", "/eldr/drain", json={"replica": replica})
    assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = answer.json()
    return int(fields["in_flight"])


async def test_a_drained_worker_is_soon_empty_and_no_answer_changes(
    service: Service, table_file: Path, prompts: list[str]
) -> None:
    service.set_policy("round-robin")
    prompts_of_streams = [prompts[number % len(prompts)] for number in range(STREAMS)]
    undisturbed = await asyncio.gather(*(read_stream(service, prompt, []) for prompt in prompts))
    expected = dict(zip(prompts, undisturbed, strict=True))
    before = service.status()["counters"]
    victim = service.status()["workers"][0]["worker"]
    received: list[list[str]] = [[] for _ in prompts_of_streams]
    answers = [
        asyncio.create_task(read_stream(service, prompt, texts))
        for prompt, texts in zip(prompts_of_streams, received, strict=True)
    ]
    await until(lambda: all(len(texts) > 20 for texts in received), "all streams have begun", 60)
    assert not any(answer.done() for answer in answers)
    assert in_flight(service, victim) > 0
    await until(lambda: in_flight(service, victim) == 0, "the worker is empty", 60)
    assert not any(answer.done() for answer in answers), "it was empty only because its answers had ended"
    assert await asyncio.gather(*answers) == [expected[prompt] for prompt in prompts_of_streams]
    after = service.status()["counters"]
    assert after["moved"] > before.get("moved", 0)
    for event in ("resumed", "streams_lost"):
        assert after.get(event, 0) == before.get(event, 0)

    assert victim not in service.decodes()
    (other,) = service.decodes()
    refused = service.admin("PUT", "/eldr/drain", json={"replica": other})
    assert refused.status_code == 409
