"""Each data-parallel rank of a decode engine is a worker of the router, and answers like one plain engine."""

import asyncio
import itertools
import os
import signal

import psutil
import pytest

from eldr_serve.scheduling.worker_names import rank_of, replica_of, worker_names
from loadgen.processes import is_alive
from tests.e2e.service import HTTP, Service, pid_of, until, wait_for
from tests.e2e.streams import Stream, complete


def replica(service: Service) -> str:
    """Return the decode replica, whose ranks are the workers."""
    workers = service.decodes()
    (name,) = set(map(replica_of, workers))
    assert workers == set(worker_names(name, 2))
    return name


def cores(replica: str) -> list[psutil.Process]:
    """Return the processes of the engine's ranks, in order."""
    children = psutil.Process(pid_of(replica)).children(recursive=True)
    engine_cores = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    return sorted(engine_cores, key=lambda child: " ".join(child.cmdline()))


def test_greedy_answers_alternate_over_the_ranks_and_equal_the_single_engine(
    wide: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    answers = [complete(wide, prompt) for prompt in prompts]
    assert [text for _, text in answers] == single_engine["completions"]
    workers = worker_names(replica(wide), 2)
    first = workers.index(answers[0][0])
    turns = itertools.islice(itertools.cycle(workers), first, None)
    assert [worker for worker, _ in answers] == list(itertools.islice(turns, len(answers)))
    counters = wide.status()["counters"]
    assert counters["placed"] >= len(prompts)
    assert counters.get("counts_missing", 0) == 0


async def test_a_rank_computes_what_its_worker_leases(wide: Service, prompts: list[str]) -> None:
    await until(lambda: wide.kv_usage() == 0.0, "the engines are empty")
    stream = Stream({"prompt": prompts[0], "max_tokens": 1500})
    reading = asyncio.create_task(stream.read(wide))
    usage: dict[str, float] = {}

    def in_use() -> bool:
        usage.update(wide.status()["ingress"]["decode_kv_usage"])
        return any(usage.values())

    await until(in_use, "a rank's KV cache is in use")
    assert len(usage) == 2
    assert [worker for worker, share in usage.items() if share] == [stream.worker]
    loads = {worker["worker"]: worker["in_flight"] for worker in wide.status()["workers"]}
    assert loads == {worker: int(worker == stream.worker) for worker in usage}
    reading.cancel()
    live = wide.admin("GET", "/eldr/live").json()["live"]
    assert set(live["steps"]) == set(usage)  # each rank's own


@pytest.mark.parametrize("where", ["body", "header"])
def test_a_client_cannot_choose_the_rank(wide: Service, where: str) -> None:
    body = {"model": "eldr-demo", "prompt": "x"} | ({"data_parallel_rank": 0} if where == "body" else {})
    headers = {"X-Data-Parallel-Rank": "0"} if where == "header" else {}
    answer = HTTP.post(f"{wide.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert "because the router chooses the rank: leave it out" in answer.json()["error"]["message"]


@pytest.mark.long
async def test_a_killed_rank_ends_its_engine_but_no_answer(
    wide: Service, prompts: list[str], single_engine: dict[str, list[str]]
) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 300} for prompt in prompts[:4]]
    whole = [Stream(body) for body in bodies]
    await asyncio.gather(*(stream.read(wide) for stream in whole))
    lost = replica(wide)
    ranks = cores(lost)
    assert len(ranks) == 2

    streams = [Stream(body) for body in bodies]
    reading = [asyncio.create_task(stream.read(wide)) for stream in streams]
    while min(stream.events for stream in streams) < 20:
        await asyncio.sleep(0.02)
    assert not any(task.done() for task in reading)
    assert sorted(rank_of(stream.worker) or 0 for stream in streams) == [0, 0, 1, 1]
    os.kill(ranks[1].pid, signal.SIGKILL)
    await asyncio.gather(*reading)  # the answers end on the ranks of the engine that replaces it
    assert [stream.text for stream in streams] == [stream.text for stream in whole]
    assert not any(stream.error for stream in streams)
    wait_for(lambda: not any(map(is_alive, ranks)), "no process of the engine is left", 30)
    assert replica(wide) != lost
    wait_for(lambda: wide.counter("resumed") == len(streams), "the resumed answers are counted", 10)
    wait_for(lambda: wide.status()["ingress"]["all_warm"], "the new engine is warm", 60)
    answers = [complete(wide, prompt) for prompt in prompts[:4]]
    assert [text for _, text in answers] == single_engine["completions"][:4]
    assert {worker for worker, _ in answers} == wide.decodes()
