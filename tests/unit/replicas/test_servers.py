"""Engine replicas over a fake engine or none."""

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from eldr_serve.channel import CallFailedError
from eldr_serve.engine.calls import expert_counts_of
from eldr_serve.engine.methods import SLOT_METHODS, WAIT_FOR_COUNTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.report_fields import KV_USAGE, QUEUE, REPORT_NUMBER
from eldr_serve.pipeline.prefill.split_prefill import read_prefill_reply
from eldr_serve.replicas import decode_reporter, servers
from eldr_serve.scheduling.cost import StepAnswer, StepSums
from eldr_serve.scheduling.prefixes import BlockChanges, PrefixCacheSize
from tests.support.channel_calls import read_all
from tests.support.engine_server import COUNTS, generate, serving
from tests.support.fake_router import wait_until

KNOWN, UNKNOWN = StepAnswer(0.0, True), StepAnswer(0.0, False)  # the router's answers to a report


def router(*answers: Exception | StepAnswer) -> Any:
    """Return the actor's handle. The first calls have these answers, or raise these errors, in turn."""
    observe = AsyncMock(side_effect=itertools.chain(answers, itertools.repeat(KNOWN)))
    return Mock(observe_steps=Mock(remote=observe), reports=lambda: observe.await_count)


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Report steps as replica r0, without Serve and in short periods."""
    monkeypatch.setattr(decode_reporter, "_REPORT_PERIOD_S", 0.001)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(decode_reporter.serve, "get_replica_context", lambda: context)
    return monkeypatch


async def report(
    reporting: pytest.MonkeyPatch, find: Any, until: Any, steps: float = 1.0, in_flight: int = 0
) -> None:
    """Report steps to the router that `find` returns until the condition holds."""
    reporting.setattr(decode_reporter, "find_actor", find)
    engine: Any = SimpleNamespace(
        ranks=lambda: 1,
        take_steps=lambda rank: StepSums(steps=steps),
        prefix_cache=lambda: PrefixCacheSize(32, 960),
        take_prefix_changes=lambda *, full: BlockChanges(full=full),
    )
    reporter = decode_reporter.DecodeReporter(engine, "router", lambda: in_flight)
    task = asyncio.create_task(reporter.run())
    await wait_until(until)
    task.cancel()


async def test_a_slow_lookup_of_the_router_does_not_block_the_loop(reporting: pytest.MonkeyPatch) -> None:
    actor, loop_runs, free = router(), threading.Event(), []

    def find(name: str) -> Any:
        free.append(loop_runs.wait(5))
        return actor

    asyncio.get_running_loop().call_later(0.05, loop_runs.set)
    await report(reporting, find, lambda: actor.reports() >= 3)
    assert free == [True]


async def test_an_engine_with_calls_reports_also_while_it_ends_no_step(reporting: pytest.MonkeyPatch) -> None:
    """A step may take longer than the period."""
    actor = router()
    await report(reporting, lambda name: actor, lambda: actor.reports() >= 2, steps=0.0, in_flight=1)


async def test_the_router_is_looked_up_again_only_after_it_died(reporting: pytest.MonkeyPatch) -> None:
    actor, look_ups = router(ActorUnavailableError("test", None), KNOWN, ActorDiedError()), []

    def find(name: str) -> Any:
        look_ups.append(actor.reports())
        if len(look_ups) == 1:
            raise ValueError("not there yet")
        return actor

    await report(reporting, find, lambda: actor.reports() >= 5)
    assert look_ups == [0, 0, 3]


async def test_a_report_is_repeated_until_it_is_confirmed(reporting: pytest.MonkeyPatch) -> None:
    """The router may have applied a report whose answer was lost, so its steps must not change."""
    actor = router(*[ActorUnavailableError("test", None)] * 2)
    await report(reporting, lambda name: actor, lambda: actor.reports() >= 5)
    reports = [call.args for call in actor.observe_steps.remote.await_args_list[:5]]
    assert [list(steps) for steps, *_ in reports] == [["r0"]] * 5
    assert [(number, steps["r0"].steps) for steps, _, _, number in reports] == [
        (1, 1),
        (1, 1),
        (1, 1),
        (2, 3),  # steps since the first try are included
        (3, 1),
    ]
    assert actor.observe_steps.remote.await_args.args[1] == (32, 960)


async def test_an_engine_reports_all_cached_blocks_until_the_router_knows_them(
    reporting: pytest.MonkeyPatch,
) -> None:
    actor = router(ActorUnavailableError("test", None), KNOWN, KNOWN, UNKNOWN)
    await report(reporting, lambda name: actor, lambda: actor.reports() >= 7)
    is_full = [call.args[2].full for call in actor.observe_steps.remote.await_args_list]
    assert is_full[:7] == [True, True, False, False, True, False, False]


@pytest.mark.parametrize("steps", [StepSums(steps=1.0), StepSums.from_prompts([2], [90], [500], [0.1])])
async def test_requests_in_the_decode_queue_count_for_the_autoscaler(
    reporting: pytest.MonkeyPatch, steps: StepSums
) -> None:
    actor = Mock(observe_steps=Mock(remote=AsyncMock(return_value=StepAnswer(2.5, True))))
    reporting.setattr(decode_reporter, "find_actor", lambda name: actor)
    async with serving(servers.DecodeServer, router_name="router") as (server, _):
        reporting.setattr(server._engine, "take_steps", lambda rank: steps)

        async def until(in_flight: float) -> None:
            async with asyncio.timeout(30):
                while (await server.record_autoscaling_stats())["in_flight"] != in_flight:
                    await asyncio.sleep(0.001)

        await until(2.5)
        actor.observe_steps.remote.side_effect = ActorUnavailableError("test", None)
        await until(0.0)


async def test_a_prefilled_prompt_is_held_until_its_release() -> None:
    async with serving(servers.PrefillServer) as (server, channel):
        for name, counts in (("a", COUNTS[0]), ("b", COUNTS[1])):
            request = EngineRequest("completions", b'{"prompt": "x"}', name)
            call = channel.call("prefill", request)
            reply = await read_prefill_reply(call)
            np.testing.assert_array_equal(expert_counts_of(reply.kv_transfer_params), counts)
            assert np.frombuffer(reply.token_ids, np.uint32).size
        assert server._engine.held_prompts == {"a", "b"}
        await channel.call("release", {"id": "a"}).wait_until_ended()
        assert server._engine.held_prompts == {"b"}
        assert await server.record_autoscaling_stats() == {"in_flight": 0.0, "kv_in_use": 0.0}
        assert not hasattr(server, "record_routing_stats")  # Serve's controller would poll dead replicas
        samples = [server.report() for _ in range(2)]
        assert [(sample[REPORT_NUMBER], sample[KV_USAGE]) for sample in samples] == [(0, 0.0), (1, 0.0)]
        await server.check_health()


async def test_only_calls_that_need_a_slot_count_as_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a whole replica each request has a second call, which waits for the counts of its prompt."""
    options: Any = {"router_name": "router", "deployment_config": {"max_ongoing_requests": 2}}
    async with serving(servers.DecodeServer, **options) as (server, channel):
        monkeypatch.setattr(server._engine, "wait_for_counts", lambda request_id: asyncio.Event().wait())
        counts = [channel.call(WAIT_FOR_COUNTS, {"id": name}) for name in ("a", "b")]
        answers = [generate(channel, name, tokens=10**6) for name in ("a", "b")]
        await asyncio.gather(*(answer.read() for answer in answers))  # neither is refused
        assert (server._channel_server.in_flight, channel.in_flight) == (4, 4)
        assert channel.count_calls(SLOT_METHODS) == 2
        assert (await server.record_autoscaling_stats())["in_flight"] == 2.0
        assert server.report()[QUEUE]["calls"] == 2
        with pytest.raises(CallFailedError, match="2 requests are in flight"):
            await generate(channel, "c").read()
        for call in (*counts, *answers):
            call.cancel()
            await call.wait_until_ended()
        assert channel.count_calls(SLOT_METHODS) == server._channel_server.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_has_its_number_of_tokens(stream: bool) -> None:
    async with serving(servers.DecodeServer, router_name="router") as (_, channel):
        text, tokens = await read_all(generate(channel, tokens=3, stream=stream))
        assert tokens == 3
        assert text.count(b"data: ") == (4 if stream else 0)
        assert text.count(b" token") == 3


@pytest.mark.parametrize(
    ("method", "header", "status"),
    [
        ("prefill", {"method": "completions", "body": b"?"}, 400),  # the body is not JSON
        ("prefill", {"method": "completions", "body": b"{}", "id": 1}, 400),  # the id is no string
        ("embeddings", {"method": "embeddings"}, 400),
        ("release", {"id": "id", "prompt": "x"}, 400),  # the header has an unknown field
    ],
)
async def test_a_failed_call_has_status_and_error(method: str, header: dict[str, Any], status: int) -> None:
    async with serving(servers.PrefillServer) as (_, channel):
        with pytest.raises(CallFailedError) as failure:
            await channel.call(method, header).read()
        assert failure.value.status == status
        assert json.loads(failure.value.body)["error"]["code"] == status


async def test_the_destructor_is_called_by_serve_and_not_by_python() -> None:
    """Serve awaits the object's attribute. Python would call the class's method without awaiting it."""
    async with serving(servers.DecodeServer, router_name="router") as (server, _):
        assert server.__del__ == server.shut_down
        assert not hasattr(type(server), "__del__")
