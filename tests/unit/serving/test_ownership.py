"""No answer is ever of another prompt's KV blocks, whatever fails and whenever; see fake_engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engines import INTERVALS, SOMEBODY_ELSES, TOKENS, World
from hypothesis import given, settings
from hypothesis import strategies as st
from router_talk import all_is_over

from eldr_serve.serving.errors import Overloaded

FAULTS = ("prefill dies", "decode dies", "decode unreachable", "client leaves")
AFTER_A_TOKEN = INTERVALS[INTERVALS.index("first-token") :]


def right(prompt: str) -> list[str]:
    return [f"{prompt} {token}" for token in range(TOKENS)]


def assert_right_or_error(prompt: str, answer: Any) -> None:
    """The prompt's tokens: all of them, those before an error that says so, or none and an exception."""
    if isinstance(answer, list):
        *tokens, last = answer
        if '"engine_lost"' not in last:
            tokens = answer
            assert len(tokens) == TOKENS
        assert tokens == right(prompt)[: len(tokens)]
    else:
        assert isinstance(answer, Overloaded | asyncio.CancelledError), repr(answer)


async def assert_all_is_over(world: World, *, by_lease: bool) -> None:
    """No lease, no block held, and no wrong text in a prefix cache. `by_lease`: some end by their lease."""
    await all_is_over(world.client, world.actor)
    if by_lease:
        await asyncio.sleep(0.05)  # what runs on unseen
        for engine in world.prefills.engines.values():
            engine.end_leases()
    async with asyncio.timeout(5):
        while any(engine.owned for engine in world.prefills.engines.values()):
            await asyncio.sleep(0.005)
    for engine in world.decodes.engines.values():
        for prompt, text in engine.prefix_cache.items():
            assert text == prompt


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("interval", INTERVALS)
async def test_a_fault_in_every_interval_of_a_requests_life(interval: str, fault: str, stream: bool) -> None:
    async with World([(interval, fault)]).serving() as world:
        answers = dict(zip("ab", await world.answers(["a", "b"], stream=stream), strict=True))
        assert world.happened == [(interval, fault)]
        for prompt, answer in answers.items():
            assert_right_or_error(prompt, answer)
        spared = stream and interval in AFTER_A_TOKEN  # what came before a token costs nobody an answer
        if fault != "client leaves" and not spared:
            assert answers == {prompt: right(prompt) for prompt in "ab"}
        # The blocks of a call whose channel is lost are freed by their lease.
        await assert_all_is_over(world, by_lease=fault != "client leaves")
        for prompt in "ab":  # nobody has kept a wrong prefix
            assert await world.ask(prompt, stream=stream) == right(prompt)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(INTERVALS), st.sampled_from(FAULTS)), max_size=5),
    st.booleans(),
)
def test_whatever_fails_no_answer_is_of_another_prompt(faults: list[tuple[str, str]], stream: bool) -> None:
    async def run() -> None:
        async with World(faults).serving() as world:
            prompts = ["a", "b", "c"]
            for prompt, answer in zip(prompts, await world.answers(prompts, stream=stream), strict=True):
                assert_right_or_error(prompt, answer)
            await assert_all_is_over(world, by_lease=True)

    asyncio.run(run())


async def test_a_fake_engine_reads_another_prompts_blocks_once_they_are_free() -> None:
    world = World([])
    prefill, decode = world.prefills.engines["p0"], world.decodes.engines["d0"]
    prefill.owned["r"], prefill.memory[:2] = [0, 1], ["a", "a"]
    handed_over = prefill.handed_over("r", [0, 1])
    assert [decode.read("a", handed_over) for _ in range(2)] == ["a", f"a, {SOMEBODY_ELSES}"]
