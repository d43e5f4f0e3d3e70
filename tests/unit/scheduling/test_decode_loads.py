"""The time of a step with another request, from the router's loads and the engines' step records."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from eldr_serve.router_protocol.messages import decoder, encode
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.decode_loads import CachedShare, DecodeLoads, StepTimeModel, WorkerLoads
from eldr_serve.scheduling.prefixes import prompt_blocks
from tests.support.fake_router import place_one, router_and_client, router_state

COST = StepCost(fixed_s=4e-3, per_request_s=1e-4, per_kv_token_s=1e-6, per_expert_s=5e-5)


def test_active_experts_grow_like_those_of_independent_requests() -> None:
    rng, experts, per_token = np.random.default_rng(0), 512, 32

    def active(requests: int) -> float:
        """Return the mean number of distinct experts of so many random requests."""
        draws = [rng.choice(experts, per_token, replace=False) for _ in range(requests * 200)]
        unions = np.zeros((200, experts), bool)
        for number, draw in enumerate(draws):
            unions[number % 200, draw] = True
        return float(unions.sum(axis=1).mean())

    measured = {n: active(n) for n in (4, 8, 16)}
    steps = StepSums.from_steps([8] * 50, [800] * 50, [measured[8]] * 50, [0.01] * 50)
    model = StepTimeModel.from_steps(COST, steps, experts)
    for requests, found in measured.items():
        assert model.seconds(requests, 100) == pytest.approx(COST.seconds(requests, 100, found), rel=0.02)


def test_prompts_lengthen_the_steps_of_whole_replicas() -> None:
    cost = StepCost(per_prompt_token_s=1e-4)
    decode = StepSums.from_steps([4] * 10, [40] * 10, [9] * 10, [0.01] * 10)
    prompts = StepSums.from_prompts([4] * 10, [40] * 10, [800] * 10, [0.09] * 10)
    steady, busy = (StepTimeModel.from_steps(cost, steps, 0) for steps in (decode, decode + prompts))
    # 8000 tokens in 20 steps of 4 requests: 100 tokens for each request in a step.
    assert busy.seconds(6, 0) - steady.seconds(6, 0) == pytest.approx(6 * 100 * 1e-4)


def test_prompts_beside_prefill_engines_have_a_time_and_change_no_other_cost() -> None:
    decode = StepSums.from_steps([4] * 10, [40] * 10, [9] * 10, [0.01] * 10)
    prompts = StepSums.from_local_prompts([4] * 10, [40] * 10, [800] * 10, [0.09] * 10)
    load, load_without = (StepTimeModel.from_steps(COST, steps, 0) for steps in (decode + prompts, decode))
    assert load.local_prompt_token_s == pytest.approx((0.09 - COST.seconds(4, 40, 9)) / 800)
    assert replace(load, local_prompt_token_s=0.0) == load_without
    assert StepTimeModel.from_steps(COST, prompts, 0).local_prompt_token_s == 0.0  # there are no decode steps
    assert not (decode + prompts).prompts.any()


def test_nothing_is_predicted_without_a_cost() -> None:
    with pytest.raises(ValueError, match="unknown"):
        StepTimeModel().seconds(1, 1)
    assert StepTimeModel.from_steps(COST, StepSums(), 64).seconds(1, 0) == pytest.approx(4.1e-3)


def test_loads_travel_as_messages() -> None:
    cost = StepCost(batch_s={1: 0.0, 8: 1e-3})
    assert cost.seconds(2, 0, 0) > 0  # this caches a table
    columns = {"in_flight": [3], "kv_tokens": [70], "cached_tokens": [16]}
    workers = WorkerLoads(("r0",), **{name: np.array(column) for name, column in columns.items()})
    loads = DecodeLoads(workers, 2, StepTimeModel(cost, 64, 0.9, 5.0, 1e-4), 0.25)
    copy = decoder(DecodeLoads)(encode(loads))
    assert replace(copy, workers=workers) == loads
    assert copy.workers.rows == {"r0": 0}
    assert {name: getattr(copy.workers, name).tolist() for name in columns} == columns


def _blocks(tokens: int) -> Iterator[object]:
    return prompt_blocks(np.arange(tokens, dtype=np.uint32), 16)


async def test_the_router_answers_with_loads_cost_and_cached_tokens() -> None:
    async with router_and_client("r0", "r1", cost=COST) as (actor, client):
        await client.operator.status()
        place_one(actor.state, "a", blocks=_blocks(33), prompt_tokens=33)
        (busy,) = (lease.worker for lease in actor.running.values())
        loads = await client.decode_loads(_blocks(65))
        workers, row = loads.workers, loads.workers.rows[busy]
        assert (workers.in_flight[row], workers.kv_tokens[row], workers.cached_tokens[row]) == (1, 33, 32)
        assert workers.in_flight.sum() == 1
        assert loads.step.cost == COST
        assert not (await client.decode_loads(None)).workers.cached_tokens.any()
        actor.state.leases.finish("a")


def test_the_share_of_cached_tokens_is_that_of_all_placed_prompts() -> None:
    state = router_state(workers=1, table=None, policy="shortest-queue")
    place_one(state, "a", blocks=_blocks(33), prompt_tokens=33)
    place_one(state, "b", blocks=_blocks(33), prompt_tokens=33)
    assert state.decode_loads(None).cached_share == pytest.approx(32 / 66)


def test_only_the_newest_prompts_count_in_the_cached_share() -> None:
    share, rng = CachedShare(prompts=5), np.random.default_rng(0)
    assert share.value == 0.0
    prompts = [(int(rng.integers(n + 1)), n) for n in rng.integers(0, 100, 40).tolist()]
    for number, prompt in enumerate(prompts):
        share.record(*prompt)
        newest = prompts[max(0, number - 4) : number + 1]
        expected = sum(cached for cached, _ in newest) / max(sum(tokens for _, tokens in newest), 1)
        assert share.value == pytest.approx(expected)
