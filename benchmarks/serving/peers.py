"""Compare the cost of eldr_serve's layer with peers on equal engines: prefill, hand-over, decode, one table.

    python -m venv router-venv && router-venv/bin/pip install vllm-router==0.1.17
    python -m benchmarks.serving.peers --vllm-router-venv router-venv

Systems:
    eldr           this package, with the ingress's own port and channels to the engines
    ray-pd         Ray Serve LLM's build_pd_openai_app; its decode replica calls the prefill replica
    no-router      plain vLLM servers; the client sends the prefill and the decode call, to each in turn
    eldr-proxy     as eldr, through Ray Serve's own proxy
    vllm-router    the Rust router over the same servers; with `--router-policies` one system per policy
    ...-polled     the same, but servers load EldrConnector's module, so NIXL does not spin a core per engine

One system runs at a time, since idle engines with NIXL's progress thread would slow the others. Each round
starts new engines and has its trials in random order. `--turns N` starts all systems at once instead, and
runs N short trials of each in turn, so that machine speed and an engine's place in memory affect all systems
alike. This needs systems whose idle engines sleep. Ray's idle cost (docs/operations.md) is then in the rows
of all systems, in column `ray_cpu_ms`. `--record FILE` keeps every trial, and the trials that FILE has
already count, so that a long comparison can be split into short runs.

Rows are medians over trials. `_cpu_ms` columns are CPU time per request of the serving processes. An
`_over_SYSTEM_pct` column is the median change against SYSTEM's trial in the same round and turn, with a 95 %
interval. `ttft_beyond_SYSTEM_ms` is the change of the TTFT as a difference in ms.

This compares the whole product with the whole peer, on engines that spend their time on experts:

    python -m benchmarks.serving.peers --deployment deployments/cpu_demo_4d.yaml --decode-replicas 4 \\
        --intermediate 1536 --stream-interval 16 --in-flight 64 --requests 40 --warm-up 128 \\
        --min-tokens 80 --max-tokens 240 --max-prompt-tokens 128 --systems eldr,vllm-router-polled \\
        --router-policies random,round_robin,power_of_two,consistent_hash,cache_aware \\
        --vllm-router-venv router-venv --rounds 1 --out benchmarks/results/peers_4d.json
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer

from benchmarks.lib import client, options
from benchmarks.lib.cluster import local_ray, unwind_on_sigterm, wait_ready
from benchmarks.lib.cpu_time import cpu_s
from benchmarks.lib.engines import ray_pd_arguments, vllm_router, vllm_servers
from benchmarks.lib.live import wide_arguments
from benchmarks.lib.prompts import bodies
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.commands.run import run
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError
from loadgen.journal import Journal
from loadgen.results import publish
from loadgen.statistics import median_ci, put_interval

BENCHMARKS = {"peers": "all"}
RAY_SYSTEMS = ("eldr", "eldr-proxy", "ray-pd")
SERVER_SYSTEMS = ("no-router", "vllm-router", "no-router-polled", "vllm-router-polled")
ROUTER_POLICIES = ("random", "round_robin", "power_of_two", "consistent_hash", "cache_aware")
_NIXL = (
    "plain NIXL spins one core per engine, which the others share; -polled: the same servers with our "
    "connector module, which polls"
)
_MEDIANS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "latency_p50_ms", "requests_per_s")
_TIMEOUT_S = 60.0  # slower requests count as failed


@contextmanager
def _serve(system: str, arguments: dict[str, Any], port: int) -> Iterator[dict[str, client.Send]]:
    with local_ray(http_port=port, environment=QUIET if system == "eldr" else {}):
        from ray import serve
        from ray.serve.llm import build_pd_openai_app

        from eldr_serve.app import build_app

        is_ours = system.startswith("eldr")
        if system == "eldr":
            arguments = arguments | {"ingress": {"port": port + 1}}
        build = build_app(arguments) if is_ours else build_pd_openai_app(ray_pd_arguments(arguments))
        serve.run(build, name=system, route_prefix="/")
        url = f"http://127.0.0.1:{port + 1 if system == 'eldr' else port}"
        if is_ours:
            wait_ready(url, 240)
        yield {system: client.completion_sender(url)}


@contextmanager
def _servers(
    systems: list[str], arguments: dict[str, Any], port: int, venv: Path | None
) -> Iterator[dict[str, client.Send]]:
    """Run the systems that share the same plain vLLM servers."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        is_polled = "-polled" in systems[0]
        urls = stack.enter_context(vllm_servers(arguments, port=port + 1, logs=logs, our_connector=is_polled))
        senders: dict[str, client.Send] = {}
        for number, system in enumerate(systems):
            if system.startswith("no-router"):
                senders[system] = _sender_without_router(urls)
                continue
            assert venv is not None
            policy = system.partition("/")[2] or "round_robin"
            servers = [part for role in urls for url in urls[role] for part in (f"--{role}", url)]
            router = vllm_router(
                venv, policy, number, ["--vllm-pd-disaggregation", *servers], port=port, logs=logs
            )
            senders[system] = client.completion_sender(stack.enter_context(router))
        yield senders


def _sender_without_router(urls: dict[str, list[str]]) -> client.Send:
    """Return a function that sends each request to the next prefill and the next decode engine."""
    pairs = zip(cycle(urls["prefill"]), cycle(urls["decode"]))
    return lambda http, body: _send_without_router(http, *next(pairs), body)


async def _send_without_router(http: Any, prefill: str, decode: str, body: dict[str, Any]) -> client.Answer:
    """Send the prefill and the decode call directly to the engines at these URLs."""
    start = time.perf_counter()
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    first = body | {"max_tokens": 1, "kv_transfer_params": remote}
    headers = {"X-Request-Id": uuid.uuid4().hex}
    try:
        async with http.post(f"{prefill}/v1/completions", json=first, headers=headers) as response:
            if response.status != 200:
                return client.Answer(start, time.perf_counter(), error=f"prefill: HTTP {response.status}")
            params = (await response.json())["kv_transfer_params"]
    except (aiohttp.ClientError, OSError) as error:
        return client.Answer(start, time.perf_counter(), error=f"prefill: {type(error).__name__}")
    body = body | {"kv_transfer_params": params}
    return await client.request_completion(http, decode, body, start)


async def _trial(
    send: client.Send, loads: list[int], per_load: int, work: list[dict[str, Any]], warm_up: int
) -> dict[str, Any]:
    """Return a row for each load, from answers that end after `warm_up` others while the loop continues.

    Requests that begin together would queue for prefill together.
    """
    rows = {}
    cpu_marks: list[Counter[str]]  # CPU times at the start and the end of the counted answers

    async def send_one(number: int, last: int) -> client.Answer:
        answer = await send(http, work[number % len(work)])
        ended.append(number)
        if len(ended) in (warm_up, last):
            cpu_marks.append(cpu_s())
        return answer

    async with client.open_session(_TIMEOUT_S) as http:
        for in_flight in loads:
            requests = per_load * min(in_flight, 4)
            cpu_marks, ended = [], list[int]()
            last = warm_up + requests
            answers = await client.closed_loop(
                partial(send_one, last=last), requests=last + in_flight, in_flight=in_flight
            )
            answers.sort(key=lambda answer: answer.ended_at_s)
            measured_answers = answers[warm_up:last]
            row = client.summarise_answers(measured_answers, answers[warm_up - 1].ended_at_s)
            cpu = {part: 1000 * (s - cpu_marks[0][part]) / requests for part, s in cpu_marks[1].items()}
            rows[str(in_flight)] = row | {"errors": client.count_failures(measured_answers), "cpu_ms": cpu}
    return rows


def _rows(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for system in dict.fromkeys(trial["system"] for trial in trials):
        trials_of_system = [trial["loads"] for trial in trials if trial["system"] == system]
        for in_flight in dict.fromkeys(load for loads in trials_of_system for load in loads):
            loads_of_trials = [loads[in_flight] for loads in trials_of_system if in_flight in loads]
            row: dict[str, Any] = {
                "system": system,
                "in_flight": int(in_flight),
                "trials": len(loads_of_trials),
            }
            for name in ("requests", "failures"):
                row[name] = sum(m[name] for m in loads_of_trials)
            for name in _MEDIANS:
                row[name] = float(np.median([m[name] for m in loads_of_trials]))
            for part in sorted({part for m in loads_of_trials for part in m["cpu_ms"]}):
                row[f"{part}_cpu_ms"] = float(
                    np.median([m["cpu_ms"].get(part, 0.0) for m in loads_of_trials])
                )
            for name in ("ttft_p50_ms", "tpot_p50_ms", "requests_per_s"):
                put_interval(row, name, median_ci([m[name] for m in loads_of_trials]))
            rows.append(row | _compare_pairs(trials, system, in_flight))
    return sorted(rows, key=lambda row: (row["in_flight"], row["system"]))


def _compare_pairs(trials: list[dict[str, Any]], system: str, load: str) -> dict[str, float]:
    """Compare `system` with vllm-router and with no router, by their trials of the same round and turn."""

    def values(name: str, column: str) -> dict[tuple[int, int], float]:
        return {
            (trial["round"], trial["turn"]): trial["loads"][load][column]
            for trial in trials
            if trial["system"] == name and load in trial["loads"]
        }

    changes: dict[str, float] = {}

    def put_change(key: str, column: str, change: Callable[[float, float], float]) -> None:
        own, others = values(system, column), values(other, column)
        if paired := [change(own[when], others[when]) for when in own if when in others]:
            put_interval(changes, key, median_ci(paired))

    for other in dict.fromkeys(trial["system"] for trial in trials if trial["system"] != system):
        name = re.sub(r"\W", "_", other)
        if other.startswith("vllm-router"):
            for column, short in (("requests_per_s", "requests_per_s"), ("tpot_p50_ms", "tpot")):
                put_change(f"{short}_over_{name}_pct", column, lambda a, b: 100 * (a / b - 1))
        elif other.startswith("no-router"):
            put_change(f"ttft_beyond_{name}_ms", "ttft_p50_ms", lambda a, b: a - b)
    return changes


Turns = Annotated[
    int, typer.Option(min=1, help="Trials of each system per start; above 1: all systems run and take turns.")
]
Requests = Annotated[
    int, typer.Option(min=4, help="Requests of a trial with 1 in flight; 4 times as many with 4 or more.")
]
Longest = Annotated[int | None, typer.Option(min=1, help="Maximum tokens of a prompt; others are left out.")]
RouterPolicies = Annotated[
    str, typer.Option(help=f"Policies of vllm-router, comma-separated, of {', '.join(ROUTER_POLICIES)}.")
]


def peers(
    systems: Annotated[str, typer.Option(help="Systems, comma-separated; default: all that can run.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Starts of each system; 0: only print --record.")] = 3,
    turns: Turns = 1,
    requests: Requests = 40,
    in_flight: Annotated[str, typer.Option(help="Requests in flight, closed loop, comma-separated.")] = "1,8",
    warm_up: Annotated[int, typer.Option(min=1, help="First requests of a trial, which do not count.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of each answer.")] = 32,
    min_tokens: Annotated[
        int | None, typer.Option(min=2, help="Minimum tokens of each answer; default: --max-tokens.")
    ] = None,
    intermediate: options.Intermediate = 32,
    stream_interval: options.Interval = 1,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    decode_replicas: Annotated[int, typer.Option(min=1, help="Decode engines of each system.")] = 1,
    work: options.Work = options.WORK,
    prompts: options.Prompts = options.PROMPTS,
    max_prompt_tokens: Longest = None,
    vllm_router_venv: options.RouterVenv = None,
    router_policies: RouterPolicies = "round_robin",
    record: options.Record = None,
    port: Annotated[int, typer.Option(help="First of 200 ports that are used.")] = 8400,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare TTFT, TPOT and throughput of this package with peers on equal engines."""
    unwind_on_sigterm()
    client.allow_open_files(8192)
    chosen_systems = _choose_systems(systems, vllm_router_venv, router_policies)
    arguments = wide_arguments(deployment, widen_model(intermediate, work), stream_interval, decode_replicas)
    lengths: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "max_prompt_tokens": max_prompt_tokens,
    }
    requests_to_send = bodies(prompts, count=512, **lengths, seed=seed)
    loads = options.numbers("--in-flight", in_flight)
    inputs: dict[str, Any] = {"turns": turns, "requests": requests, "warm_up": warm_up}
    inputs |= lengths | {"min_tokens": min_tokens or max_tokens, "decode_replicas": decode_replicas}
    inputs |= {"intermediate": intermediate, "stream_interval": stream_interval}
    inputs |= {"deployment": deployment.stem, "prompts": prompts.name}
    journal = Journal(record, inputs | {"seed": seed}) if record else None
    trials: list[dict[str, Any]] = list(journal.entries.values()) if journal else []
    order = random.Random(seed + len(trials))

    def keep(number: int, turn: int, system: str, rows: dict[str, Any]) -> None:
        trials.append({"system": system, "round": number, "turn": turn, "loads": rows})
        if journal:
            journal.put(str(len(trials)), trials[-1])

    groups = _groups(chosen_systems, turns)
    start = partial(_start_groups, arguments=arguments, port=port, venv=vllm_router_venv)
    trial = partial(_trial, loads=loads, per_load=requests, work=requests_to_send, warm_up=warm_up)
    first = 1 + max((kept["round"] for kept in trials), default=-1)
    for number in range(first, first + rounds):
        _measure_round(groups, turns, order, start, trial, partial(keep, number))
    if not trials:
        raise UserInputError("there is no trial to report")
    notes = f"closed loop, greedy, {'all systems up' if turns > 1 else 'one system'} at a time; {_NIXL}"
    publish("peers", _rows(trials), inputs=inputs | {"trials": trials}, seed=seed, out=out, notes=notes)


def _measure_round(
    groups: list[list[str]],
    turns: int,
    order: random.Random,
    start: Callable[[list[list[str]]], AbstractContextManager[dict[str, client.Send]]],
    trial: Callable[[client.Send], Coroutine[Any, Any, dict[str, Any]]],
    keep: Callable[[int, str, dict[str, Any]], None],
) -> None:
    """Start each group alone, or all of them if their systems take turns, and keep each trial."""
    shuffled = order.sample(groups, k=len(groups))
    for groups_to_start in [shuffled] if turns > 1 else [[group] for group in shuffled]:
        with start(groups_to_start) as sends:
            for turn in range(turns + (turns > 1)):
                for system in order.sample(list(sends), k=len(sends)):
                    loads = asyncio.run(trial(sends[system]))
                    if turn or turns == 1:  # the first of several is a warm-up
                        keep(turn, system, loads)


def _groups(systems: list[str], turns: int) -> list[list[str]]:
    """Group the systems by what serves them: a Ray application each, or common servers."""
    groups = [[s] for s in systems if s in RAY_SYSTEMS]
    for polled in (False, True):
        groups.append([s for s in systems if s not in RAY_SYSTEMS and ("-polled" in s) == polled])
    groups = [group for group in groups if group]
    if turns > 1:
        _check_together(groups)
    return groups


@contextmanager
def _start_groups(
    groups: list[list[str]], arguments: dict[str, Any], port: int, venv: Path | None
) -> Iterator[dict[str, client.Send]]:
    """Run the groups of systems, and yield each system's client.completion_sender."""
    with ExitStack() as stack:
        sends: dict[str, client.Send] = {}
        for group in groups:
            if group[0] in RAY_SYSTEMS:
                sends |= stack.enter_context(_serve(group[0], arguments, port))
            else:
                sends |= stack.enter_context(_servers(group, arguments, port + 1, venv))
        yield sends


def _check_together(groups: list[list[str]]) -> None:
    """Raise UserInputError if the groups cannot be up at once."""
    if sum(group[0] in RAY_SYSTEMS for group in groups) > 1:
        raise UserInputError(f"with --turns only one of {', '.join(RAY_SYSTEMS)} can be up at a time")
    spinning = [s for group in groups for s in group if not s.startswith("eldr") and "-polled" not in s]
    if spinning:
        raise UserInputError(f"with --turns idle engines must sleep: leave out {', '.join(spinning)}")


def _choose_systems(systems: str, venv: Path | None, policies: str) -> list[str]:
    system_names = (*RAY_SYSTEMS, *SERVER_SYSTEMS)
    possible = [s for s in system_names if venv is not None or not s.startswith("vllm-router")]
    chosen: list[str] = []
    for system in systems.split(",") if systems else possible:
        if system not in system_names:
            raise UserInputError(f"there is no system {system!r}; there are {', '.join(system_names)}")
        if system not in possible:
            raise UserInputError(f"{system} needs --vllm-router-venv")
        several = system.startswith("vllm-router") and policies != "round_robin"
        chosen += [f"{system}/{policy}" for policy in policies.split(",")] if several else [system]
    return chosen


if __name__ == "__main__":
    run(peers)
