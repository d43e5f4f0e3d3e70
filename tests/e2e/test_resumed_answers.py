"""Answers whose decode engine stops or dies continue on another engine, without a difference."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.service import Service, controller_log, core_of, events, pid_of, until, wait_for


async def read_answer(service: Service, body: dict[str, Any], received: list[str]) -> dict[str, Any]:
    """Return an answer's text and usage. Append a stream's events to `received` as they arrive."""
    chat = "messages" in body
    async with service.post(body, "chat/completions" if chat else "completions") as response:
        assert response.status_code == 200
        if not body["stream"]:
            answer = json.loads(await response.aread())
            (choice,) = answer["choices"]
            text = choice["message"]["content"] if chat else choice["text"]
            return {"text": text, "finish": choice["finish_reason"], "usage": answer["usage"]}
        async for event in events(response):
            received.append(event)
    assert received[-1] == "[DONE]"
    parts = [json.loads(event) for event in received[:-1]]
    assert len({(part["id"], part["created"]) for part in parts}) == 1
    choices = [part["choices"][0] for part in parts[:-1]]
    texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert sum("role" in choice.get("delta", {}) for choice in choices) == chat
    return {"text": "".join(texts), "finish": choices[-1]["finish_reason"], "usage": parts[-1]["usage"]}


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    """Return the list of answers by undisturbed engines, which the first test that needs them fills."""
    return []


@pytest.mark.parametrize(
    ("find_pid", "signal_sent"),
    [(core_of, signal.SIGSTOP), (pid_of, signal.SIGSTOP), (pid_of, signal.SIGKILL)],
)
async def test_answers_resume_when_their_decode_engine_stops_or_dies(
    service: Service,
    table_file: Path,
    prompts: list[str],
    undisturbed: list[dict[str, Any]],
    find_pid: Callable[[str], int],
    signal_sent: signal.Signals,
) -> None:
    """Streams and complete answers of chat and completions equal an undisturbed engine's, under one id.

    If only the core is stopped, its replica reports this, and gets calls again when the core continues.
    """
    service.set_policy("round-robin")
    bodies: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts[:8]):
        asks: dict[str, Any] = (
            {"prompt": prompt} if number % 2 else {"messages": [{"role": "user", "content": prompt}]}
        )
        body = {"model": "eldr-demo", "temperature": 0, "max_tokens": 300, "ignore_eos": True} | asks
        streams = number % 4 < 2
        bodies.append(
            body | {"stream": streams} | ({"stream_options": {"include_usage": True}} if streams else {})
        )
    if not undisturbed:
        undisturbed += await asyncio.gather(*(read_answer(service, body, []) for body in bodies))
    before, logged = service.status()["counters"], len(controller_log())
    replica = service.status()["workers"][0]["worker"]
    victim = await asyncio.to_thread(find_pid, replica)
    received: list[list[str]] = [[] for _ in bodies]
    answers = [
        asyncio.create_task(read_answer(service, *each)) for each in zip(bodies, received, strict=True)
    ]
    streamed = [arrived for arrived, body in zip(received, bodies, strict=True) if body["stream"]]
    await until(lambda: all(len(arrived) >= 20 for arrived in streamed), "every stream has 20 events")
    assert not any(answer.done() for answer in answers)
    os.kill(victim, signal_sent)
    try:
        if find_pid is core_of:
            await until(lambda: replica not in service.decodes(), "the stopped replica gets no more calls", 3)
        # Continue the engine as soon as others have its streams: Serve replaces one that hangs for long.
        resumed_before = before.get("resumed", 0)
        await until(
            lambda: service.counter("resumed") > resumed_before, "the answers resumed on another engine", 30
        )
    finally:
        if signal_sent is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    assert await asyncio.gather(*answers) == undisturbed
    if signal_sent is signal.SIGSTOP:
        wait_for(lambda: replica in service.decodes(), "the replica gets calls again", 30)
    assert service.counter("streams_lost") == before.get("streams_lost", 0)
    if signal_sent is signal.SIGKILL:
        wait_for(
            lambda: any(replica in line and "crashed" in line for line in controller_log().splitlines()),
            "Serve's controller has detected it",
            60,
        )
        assert "routing stats" not in controller_log()[logged:]
