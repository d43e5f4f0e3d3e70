"""Decode engines that compute short prompts beside a prefill engine whose queue is long."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.applications import arguments_of, running
from tests.e2e.service import Service, wait_for

REPEATS = (
    20,
    40,
    80,
    160,
)  # copies of each prompt, up to a queue so long that decode engines are sooner


@pytest.fixture(scope="module")
def split(ray_cluster: str) -> Iterator[Service]:
    """Run one prefill engine and two decode engines, which may compute any prompt."""
    arguments = arguments_of("cpu_demo.yaml")
    arguments["path"] = {"local_prefill_tokens": 2048}
    with running("local", arguments) as service:
        yield service


async def test_greedy_answers_equal_a_single_engine_wherever_their_prompts_are_computed(
    split: Service, single_engine: dict[str, list[str]], prompts: list[str]
) -> None:
    def decode_engines_are_measured() -> bool:
        for prompt in prompts:  # two answers to one prompt come from a decode engine alone
            split.complete(prompt, n=2, max_tokens=16)
        return split.status()["step_cost"]["steps"] > 100

    def num_prefilled() -> list[int]:
        """Return how many prompts have been prefilled by decode and by prefill engines."""
        return split.settled_counters("prefilled_locally", "prefills")

    async def send_all(repeats: int) -> list[int]:
        """Send all prompts at once; return by how many the two numbers have risen since the last call."""
        nonlocal before
        answers = await asyncio.gather(*(split.greedy_async(prompt) for prompt in prompts * repeats))
        assert answers == single_engine["completions"] * repeats
        earlier, before = before, num_prefilled()
        return [now - then for now, then in zip(before, earlier, strict=True)]

    wait_for(decode_engines_are_measured, "the cost of prompts on decode engines is measured")
    before = num_prefilled()
    await send_all(REPEATS[0])  # this measures the prefill engine and the hand-over
    for repeats in REPEATS:
        num_local, num_split = await send_all(repeats)
        assert num_split > 0
        assert num_local + num_split == len(prompts) * repeats
        if num_local:
            return
    pytest.fail("no prompt was prefilled by a decode engine")
