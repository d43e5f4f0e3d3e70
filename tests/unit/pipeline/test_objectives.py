"""Admission by predicted latency, with fake engines on virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eldr_serve.engine.report_fields import BLOCK_TOKENS, QUEUE, SLOTS
from eldr_serve.errors import OverloadedError
from eldr_serve.objective import Objective
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.pipeline.services import Services
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.decode_loads import DecodeLoads, StepTimeModel, WorkerLoads
from tests.support.fake_fleet import FakeFleet, Sent, prefill_result
from tests.support.request_path import (
    FakeRouterClient,
    RecordedCounters,
    on_virtual_time,
    pack_ids,
    request_context,
)

RATE = 1000.0  # throughput of a prefill engine, tokens/s
STEP = StepTimeModel(StepCost(fixed_s=0.01, per_request_s=0.01, per_expert_s=0.0))


class Service:
    """The request path over engines that compute prompts in turn, and generate a token in each step.

    Attributes:
        refusals: error of each refused request.
        gap_s: time between two tokens of an answer.
        latencies: status of the predictions at the end of `run`.
    """

    def __init__(self, *, whole: bool = False, prefill: tuple[str, ...] = ("p0",), **options: Any) -> None:
        self.refusals: list[OverloadedError] = []
        self.latencies: dict[str, dict[str, float]] = {}
        self.gap_s = 0.01
        self._reports = 0
        self._turns: dict[str, asyncio.Lock] = {}
        self.prefill = FakeFleet(self._prefill, *(() if whole else prefill))
        self.decode = FakeFleet(self._whole if whole else self._decode, "d0", "d1")
        self.router: Any = FakeRouterClient()
        self.counters = RecordedCounters()
        fleets: Any = self.prefill, self.decode
        tokenizer: Any = PromptTokenizer("") if whole else None
        self.services = Services(
            fleets=Fleets(*fleets, PrefillRouterOptions(), decode_engines_prefill=whole),
            router_client=self.router,
            counters=self.counters,
            options=PathOptions(retry_backoff_s=0.0, **options),
            tokenizer=tokenizer,
        )
        self.path = RequestPath(self.services)

    async def _compute(self, sent: Sent) -> None:
        async with self._turns.setdefault(sent.replica, asyncio.Lock()):
            await asyncio.sleep(len(json.loads(sent.body)["prompt"]) / RATE)

    async def _prefill(self, sent: Sent) -> AsyncIterator[bytes]:
        await self._compute(sent)
        yield prefill_result(do_remote_prefill=True)

    async def _decode(self, sent: Sent) -> AsyncIterator[Any]:
        for number in range(sent.fields["max_tokens"]):
            if number:
                await asyncio.sleep(self.gap_s)
            yield b"data: x\n\n", 1, pack_ids(number)
        yield b"data: [DONE]\n\n", 0

    async def _whole(self, sent: Sent) -> AsyncIterator[Any]:
        await self._compute(sent)
        async for chunk in self._decode(sent):
            yield chunk

    def report_measurement(self, rate: float = RATE, *, queued: float = 0.0, replica: str = "p0") -> None:
        """Let a replica report its throughput and its queue."""
        fleet = self.decode if self.services.fleets.decode_engines_prefill else self.prefill
        self._reports += 1
        report = {"number": self._reports, "rate": rate, "measured_s": 60.0, "num_ingresses": 2}
        reports = {
            name: {QUEUE: report | {"tokens": queued * (name == replica)}} for name in fleet.live_workers
        }
        fleet.directory.update_reports(reports)

    async def send(self, tokens: int = 100, *, seed: int = 0, **objective: float) -> RequestContext | None:
        """Send a stream of a prompt of so many tokens, and return its context, or None if it is refused."""
        context = request_context(prompt=[seed] * tokens, stream=True)
        context.record.started_at_s = asyncio.get_running_loop().time()
        context.request = replace(context.request, objective=Objective(**objective))
        try:
            async for _ in self.path.generate(context):
                pass
        except OverloadedError as error:
            self.refusals.append(error)
            return None
        return context


def run(service: Service, main: Any) -> None:
    async def to_the_end() -> None:
        await main()
        service.latencies = service.services.prediction_recorder.status()

    on_virtual_time(to_the_end)


def retry_after_s(service: Service) -> list[int | None]:
    return [error.retry_after_s for error in service.refusals]


def test_a_request_that_would_wait_too_long_is_refused_until_it_would_not() -> None:
    service = Service()

    async def main() -> None:
        service.report_measurement(queued=5000)  # 5 s, and 0.1 s for the prompt
        started_s = asyncio.get_running_loop().time()
        assert await service.send(ttft_s=2.0) is None
        assert await service.send(ttft_s=2.0, seed=1) is None  # the request returns after the first one
        assert await service.send(ttft_s=0.05, seed=2) is None  # an idle engine takes longer, too
        assert asyncio.get_running_loop().time() == started_s
        assert await service.send(ttft_s=6.0, seed=3) is not None

    run(service, main)
    assert retry_after_s(service) == [4, 4, 10]  # 3.1 s and 3.2 s
    assert "first token after 5100 ms (objective: 2000 ms)" in str(service.refusals[0])
    assert {error.status for error in service.refusals} == {503}
    assert service.counters.events.count("refused_objective") == 3


def test_refused_requests_return_one_after_the_other() -> None:
    service = Service()

    async def main() -> None:
        service.report_measurement(queued=5000)
        for seed in range(20):
            assert await service.send(1000, seed=seed, ttft_s=3.0) is None

    run(service, main)
    assert retry_after_s(service) == [*range(3, 23)]


def test_requests_that_arrive_together_count_each_other() -> None:
    service = Service()

    async def main() -> None:
        service.report_measurement()
        answered = await asyncio.gather(*(service.send(1000, seed=n, ttft_s=3.2) for n in range(10)))
        assert [context is not None for context in answered] == [True] * 3 + [False] * 7

    run(service, main)


def test_without_an_objective_or_measurements_nothing_is_refused_or_asked() -> None:
    service = Service()

    async def main() -> None:
        assert await service.send(ttft_s=1e-6, tpot_s=1e-6) is not None  # nothing is known yet
        service.report_measurement(queued=9000)
        num_calls = len(service.router.blocks)
        context = await service.send()
        assert context is not None
        assert context.record.prediction is None
        assert len(service.router.blocks) == num_calls

    run(service, main)
    assert service.latencies["ttft"]["requests"] == 0


def test_a_prompt_goes_to_a_replica_that_meets_its_objective() -> None:
    service = Service(prefill=("p0", "p1"))

    async def main() -> None:
        for busy, idle in (("p0", "p1"), ("p1", "p0")):
            service.report_measurement(queued=5000, replica=busy)
            await asyncio.gather(*(service.send(10, seed=seed, ttft_s=1.0) for seed in range(20)))
            assert {sent.replica for sent in service.prefill.requests[-20:]} == {idle}

    run(service, main)
    assert not service.refusals


def loads(*in_flight: int, **fields: Any) -> DecodeLoads:
    names = tuple(f"d{number}" for number in range(len(in_flight)))
    requests = np.array(in_flight)
    cached_tokens = np.array(fields.pop("cached_tokens", [0] * len(in_flight)))
    workers = WorkerLoads(names, requests, 100 * requests, cached_tokens)
    return DecodeLoads(workers, **{"step": STEP, **fields})


@pytest.mark.parametrize(
    ("current_loads", "objective_s", "admitted"),
    [
        (loads(4, 8), 0.0601, True),  # 10 ms, and 10 ms for each of five requests
        (loads(4, 8), 0.0599, False),
        (loads(4, 8, waiting=2), 0.0601, False),  # one more at each worker
        (loads(4, 8, step=StepTimeModel()), 0.001, True),  # no step was measured
        (None, 0.001, True),  # the router does not answer
    ],
)
def test_the_step_with_one_more_request_decides(
    current_loads: DecodeLoads | None, objective_s: float, admitted: bool
) -> None:
    service = Service()

    async def main() -> None:
        service.router.loads = current_loads
        assert (await service.send(tpot_s=objective_s) is not None) == admitted

    run(service, main)


def test_a_batch_is_no_larger_than_the_slots_of_an_engine() -> None:
    service = Service()
    service.decode.directory.publish({"d0": {SLOTS: 4}, "d1": {SLOTS: 4}})

    async def main() -> None:
        service.router.loads = loads(40, 80)
        assert await service.send(tpot_s=0.0501) is not None
        assert await service.send(tpot_s=0.0499) is None

    run(service, main)


def test_a_request_may_retry_when_enough_others_will_have_ended() -> None:
    service = Service()

    async def main() -> None:
        for _ in range(3):
            running = [asyncio.create_task(service.send(10, seed=n)) for n in range(8)]
            for task in running:
                await asyncio.sleep(1.0)  # one ends each second
                await task
        service.gap_s = 100.0
        running = [asyncio.create_task(service.send(10, seed=n)) for n in range(8)]
        await asyncio.sleep(0.5)
        service.router.loads = loads(4, 4)
        service.services.prediction_recorder._ends.estimate_wait_s = lambda ahead: 2.0 * ahead  # type: ignore[method-assign]
        assert await service.send(tpot_s=0.045) is None  # three requests of one worker, six of both
        assert await service.send(tpot_s=0.019, seed=1) is None  # alone it takes 20 ms
        for task in running:
            task.cancel()

    run(service, main)
    assert retry_after_s(service) == [8, 10]
    assert "a token every 60.0 ms (objective: 45 ms)" in str(service.refusals[0])


def test_an_unreachable_objective_is_tried_again_every_10_s() -> None:
    service = Service()

    async def main() -> None:
        service.router.loads = loads(0, 0)
        for _ in range(2):
            assert await service.send(tpot_s=0.015) is None
        await asyncio.sleep(9)
        assert await service.send(tpot_s=0.015) is None
        await asyncio.sleep(1)
        assert await service.send(tpot_s=0.015) is not None
        assert await service.send(tpot_s=0.015) is None

    run(service, main)
    assert retry_after_s(service) == [10, 10, 1, 10]


def test_one_whole_replica_must_meet_both_objectives() -> None:
    service = Service(whole=True)

    async def main() -> None:
        service.report_measurement(queued=5000, replica="d0")
        service.router.loads = loads(1, 9)
        assert await service.send(ttft_s=1.0, tpot_s=0.05) is None  # d0 has the prompts, d1 the requests
        assert await service.send(ttft_s=1.0, tpot_s=0.2) is not None
        assert service.router.placements[-1][0].exclude == ("d0",)
        service.router.loads = loads(1, 9, waiting=1)
        assert await service.send(ttft_s=1.0, tpot_s=0.2, seed=1) is not None
        assert service.router.placements[-1][0].exclude == ()

    run(service, main)


def test_requests_for_whole_replicas_that_arrive_together_count_each_other() -> None:
    service = Service(whole=True)
    place = service.router.place

    async def slow(*args: Any, **fields: Any) -> Any:
        await asyncio.sleep(0.01)
        return await place(*args, **fields)

    async def main() -> None:
        service.router.place = slow
        service.report_measurement()
        service.router.loads = loads(0, 0)
        by_prompts = await asyncio.gather(*(service.send(1000, seed=n, ttft_s=2.1) for n in range(8)))
        # With two engines, each earlier request adds 0.5 s.
        assert sum(context is not None for context in by_prompts) == 3
        await asyncio.sleep(10)
        by_step = await asyncio.gather(*(service.send(10, seed=n, tpot_s=0.0351) for n in range(8)))
        # A step takes 30 ms with one more request at both engines, and 40 ms with two.
        assert sum(context is not None for context in by_step) == 4

    run(service, main)


def test_cached_tokens_of_a_whole_replica_take_no_time() -> None:
    service = Service(whole=True)
    service.decode.directory.publish({name: {BLOCK_TOKENS: 16} for name in ("d0", "d1")})

    async def main() -> None:
        service.report_measurement()
        service.router.loads = loads(0, 0, cached_tokens=[0, 1900], step=StepTimeModel(), cached_share=0.5)
        context = await service.send(2000, ttft_s=1.0)
        assert context is not None
        # The rate is that of prompts that are half cached.
        assert context.record.prediction.ttft_s == pytest.approx({"d0": 4.0, "d1": 0.2})
        assert len(service.router.blocks[-1].hashes) == 2000 // 16 - 1
        assert service.router.placements[-1][0].exclude == ("d0",)

    run(service, main)


def test_predicted_and_measured_latencies_are_summed() -> None:
    service = Service()

    async def main() -> None:
        service.report_measurement(2 * RATE)  # half the time is predicted
        service.router.loads = loads(0, 0)
        assert await service.send(1000, ttft_s=1.1, tpot_s=0.015 + 0.01) is not None
        await service.send(1000)  # this request has no objective

    run(service, main)
    ttft, tpot = service.latencies["ttft"], service.latencies["tpot"]
    assert (ttft["requests"], ttft["met"]) == (1, 1)
    assert [ttft[key] for key in ("predicted_s", "measured_s", "error_s")] == pytest.approx([0.5, 1.0, 0.5])
    assert (tpot["requests"], tpot["met"]) == (1, 1)
    assert [tpot[key] for key in ("predicted_s", "measured_s", "error_s")] == pytest.approx(
        [0.02, 0.01, 0.01]
    )


def test_the_deadline_travels_with_the_placement() -> None:
    service = Service()

    async def main() -> None:
        await service.send(400, ttft_s=3.0)
        await service.send(400, ttft_s=0.2)  # the request is late when it is placed
        await service.send(400)

    run(service, main)
    due_times_s = [request.first_token_due_in_s for request, _ in service.router.placements]
    assert due_times_s == [pytest.approx(2.6), None, None]


def test_admitted_requests_meet_their_objective_under_overload() -> None:
    """Engines are slower than measured before and vary. The errors of the first requests correct that."""
    rng, service = random.Random(0), Service()
    outcomes: list[bool | None] = []

    async def compute(sent: Sent) -> AsyncIterator[bytes]:
        async with service._turns.setdefault("p0", asyncio.Lock()):
            await asyncio.sleep(rng.uniform(0.1, 0.3))
        yield prefill_result(do_remote_prefill=True)

    service.prefill.answer = compute

    async def send(number: int) -> None:
        context = await service.send(200, seed=number, ttft_s=2.0)
        met = context and context.record.first_token_at_s - context.record.started_at_s <= 2.0
        outcomes.append(met)

    async def main() -> None:
        service.report_measurement(1.3 * RATE)
        tasks = []
        for number in range(1500):  # 7.5 a second, of which 5 fit
            tasks.append(asyncio.create_task(send(number)))
            await asyncio.sleep(rng.expovariate(7.5))
        await asyncio.gather(*tasks)

    run(service, main)
    admitted = [met for met in outcomes[150:] if met is not None]
    assert len(admitted) > 0.9 * 1350 * 5 / 7.5  # the engine is kept busy
    assert sum(admitted) >= 0.94 * len(admitted)
