"""Decode engines that compute short prompts beside a prefill engine whose queue is long."""

import asyncio

import pytest

from tests.e2e.service import Service, wait_for

REPEATS = 40  # copies of each prompt
# Times between arrivals, s, down to one at which the prefill queue becomes so long that decode engines are
# sooner. If all prompts came at once, the router would not report its loads of most of them in time.
INTERVALS_S = (0.003, 0.002, 0.001)


async def test_greedy_answers_equal_a_single_engine_wherever_their_prompts_are_computed(
    wide: Service, single_engine: dict[str, list[str]], prompts: list[str]
) -> None:
    def decode_engines_are_measured() -> bool:
        for prompt in prompts:  # two answers to one prompt come from a decode engine alone
            wide.complete(prompt, n=2, max_tokens=16)
        return wide.status()["step_cost"]["steps"] > 100

    def num_prefilled() -> list[int]:
        """Return how many prompts have been prefilled by decode and by prefill engines."""
        return wide.settled_counters("prefilled_locally", "prefills")

    async def send_all(interval_s: float, repeats: int = REPEATS) -> int:
        """Send all prompts; return how many of them decode engines have prefilled."""

        async def send(number: int, prompt: str) -> str:
            await asyncio.sleep(number * interval_s)
            return await wide.greedy_async(prompt)

        before = num_prefilled()
        answers = await asyncio.gather(*(send(n, prompt) for n, prompt in enumerate(prompts * repeats)))
        assert answers == single_engine["completions"] * repeats
        expected = sum(before) + len(answers)
        # More if the prefill engine was silent for so long that another one computed a prompt again.
        wait_for(lambda: sum(num_prefilled()) >= expected, "each prompt is counted", 30)
        num_local, num_split = (now - then for now, then in zip(num_prefilled(), before, strict=True))
        assert num_split > 0
        return num_local

    wait_for(decode_engines_are_measured, "the cost of prompts on decode engines is measured")
    await send_all(0.05, repeats=8)  # this measures the prefill engine and the hand-over
    for interval_s in INTERVALS_S:
        if await send_all(interval_s):
            return
    pytest.fail("no prompt was prefilled by a decode engine")
