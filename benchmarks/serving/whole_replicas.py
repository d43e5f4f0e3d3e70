"""Whole replicas live: our policies, and vllm-router's on plain vLLM servers, by three workloads.

    python -m venv router-venv && router-venv/bin/pip install vllm-router==0.1.17
    eldr calibrate --deployment deployments/cpu_demo_whole.yaml --prompts DIR --out calibration.safetensors
    python -m benchmarks.serving.whole_replicas --calibration calibration.safetensors --prompts DIR \\
        --trace mooncake_conversation.jsonl.gz --vllm-router-venv router-venv --record trials.jsonl

Two sets of four engines are up: those of the deployment behind our ingress, whose policy changes from trial
to trial (`eldr/POLICY`), and plain vLLM servers of the same model and settings, without a KV connector,
behind one vllm-router a policy in its regular mode (`vllm-router/POLICY`). One set has requests at a time.
The workloads: `benchmarks/lib/whole_workloads.py`.
`prefix-affinity` is benchmarks.papers.prefix_policies:LongestPrefix, a usual rule of cache-aware balancers:
of the workers that are not too loaded, the one that was sent most of the prompt's blocks.

A closed loop; a trial begins with empty prefix caches, as each has prompts of its own beginning, and with a
policy that has seen nothing. The predictor is fitted on prompts that are in no trial, and learns from trial
to trial. What is sent first in a trial, while caches fill and workers part, is in no figure.

Each round has every system once with every workload, in random order, on engines that are started anew for
it; rows are medians over rounds with 95 % intervals, of time as it was (`clock` wall) and normalised for CPU
speed (even: benchmarks/lib/normalised_time.py). `--record` keeps what was measured, and beside it the
cores' speed, so that a run that is stopped goes on. `ours_KEY_pct`: by how much `eldr/marginal-cost` is above
the row's system in the same round, median and interval; negative is better for ours but in requests/s.
`engine_ms_per_token`: CPU time of the engines' processes, prompts' included. `server_..._mean_ms`: of plain
servers by their own metrics, of all of a trial; `active_experts` and `batch_size`: of a decode step of our
engines, mean, likewise.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.capture import captured
from benchmarks.lib.client import Answer, allow_open_files, complete, errors, session, summary
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.cpu_speed import probed
from benchmarks.lib.cpu_time import cpu_s
from benchmarks.lib.engines import process, vllm_servers, wait_http
from benchmarks.lib.live import KEY, serving, wide_arguments
from benchmarks.lib.normalised_time import NormalisedTime, felt
from benchmarks.lib.prometheus import total
from benchmarks.lib.prompts import no_longer_than
from benchmarks.lib.replay import widened
from benchmarks.lib.whole_workloads import Chains, many_domains, sessions, system_prompts
from eldr_serve.client import Client
from eldr_serve.command_errors import BadInput, run
from eldr_serve.experts.calibration_trace import CalibrationTrace
from loadgen.figures import BASELINES
from loadgen.journal import Journal
from loadgen.progress import progress_bar
from loadgen.results import publish
from loadgen.statistics import median_ci
from loadgen.traces import read_trace
from loadgen.workload import Prompt, balanced_sample, read_prompts
from offline.predictor import fit_signature_predictor

WORKLOADS = ("many domains", "sessions", "system prompts")
OURS = "eldr/marginal-cost"
AFFINITY = "benchmarks.papers.prefix_policies:LongestPrefix"
POLICIES = {name: name for name in (*BASELINES, "marginal-cost")} | {"prefix-affinity": AFFINITY}
ROUTER_POLICIES = ("cache_aware", "power_of_two", "round_robin", "consistent_hash")
SIDES = ("eldr", "vllm-router")
SYSTEMS = [f"eldr/{name}" for name in POLICIES] + [f"vllm-router/{name}" for name in ROUTER_POLICIES]
CALIBRATION = 300  # prompts that the predictor is fitted on
METRICS = (
    "tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "latency_p50_ms", "requests_per_s",
    "engine_ms_per_token",
)  # fmt: skip
_TIMEOUT_S = 60.0  # a request that takes longer has failed
_SETTLE_S = 1.0  # for plain servers to drop what was cut off
_SERVER_TIMES = {"server_ttft": "time_to_first_token", "server_queue": "request_queue_time"}
_STEPS = {"active_experts": "active", "batch_size": "batch"}
_Send = Callable[[Any, dict[str, Any]], Awaitable[Answer]]
_Opened = tuple[Callable[[str], _Send], Callable[[], dict[str, float]]]


@contextmanager
def _ours(arguments: dict[str, Any], predictor: bytes, port: int) -> Iterator[_Opened]:
    """Our application; gives what sends to it under a policy, which starts anew."""
    url = f"http://127.0.0.1:{port}"
    with serving(arguments, port=port):
        client = Client(url, KEY)
        client.swap_predictor(predictor)

        def chosen(name: str) -> _Send:
            client.wait_idle()
            client.set_policy("random")  # one that is set again goes on with what it knows
            client.set_policy(POLICIES[name])
            return partial(_complete, url)

        yield chosen, partial(_step_totals, client)
        typer.echo(f"predictor: {client.status()['predictor']}")


@contextmanager
def _theirs(arguments: dict[str, Any], venv: Path, names: Iterable[str], port: int) -> Iterator[_Opened]:
    """Plain servers behind a vllm-router for each of the policies."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(vllm_servers(arguments, port=port, logs=logs))["decode"]
        fronts: dict[str, str] = {}
        for number, policy in enumerate(names):
            fronts[policy] = f"http://127.0.0.1:{port + 60 + number}"
            command = [
                str(venv / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port + 60 + number),
                "--policy", policy, "--prometheus-port", str(port + 80 + number), "--worker-urls", *urls,
            ]  # fmt: skip
            log = logs / f"vllm_router_{number}.log"
            router = stack.enter_context(process(command, env={}, log=log))
            wait_http(f"{fronts[policy]}/health", router, log, 60)

        def chosen(name: str) -> _Send:
            time.sleep(_SETTLE_S)
            return partial(_complete, fronts[name])

        yield chosen, partial(_server_times, urls)


def _server_times(urls: Sequence[str]) -> dict[str, float]:
    """Of plain servers: sums so far by vLLM's own clock, s, and requests."""
    pages = "\n".join(httpx.get(f"{url}/metrics", timeout=30).text for url in urls)
    return {
        f"{ours}_{part}": total(pages, f"vllm:{theirs}_seconds_{part}")
        for ours, theirs in _SERVER_TIMES.items()
        for part in ("sum", "count")
    }


def _step_totals(service: Client) -> dict[str, float]:
    """Of our engines: sums over decode steps so far, and their number."""
    service.wait_idle()
    found = service.settled_totals(at_rest=True) or {}
    return {key: float(found[key]) for key in ("steps", *_STEPS.values()) if key in found}


def _means(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of what came between two calls of `_server_times` or of `_step_totals`."""
    steps = after.get("steps", 0.0) - before.get("steps", 0.0)
    return {name: (after[key] - before[key]) / steps for name, key in _STEPS.items() if steps > 0} | {
        f"{name}_mean_ms": 1000
        * (after[f"{name}_sum"] - before[f"{name}_sum"])
        / max(1.0, after[f"{name}_count"] - before[f"{name}_count"])
        for name in _SERVER_TIMES
        if f"{name}_sum" in after
    }


def _complete(url: str, http: Any, body: dict[str, Any]) -> Awaitable[Answer]:
    return complete(http, url, body)


async def _trial(
    send: _Send, chains: Chains, *, in_flight: int, warm_up: int, requests: int
) -> dict[str, Any]:
    """Times of the `requests` sent after the first `warm_up`, while the loop goes on; then it is cut.

    So all systems are judged by the same requests. Requests/s and CPU times are of the time in which these
    were sent, which as many others end in.
    """
    counted: list[Answer] = []
    marks: list[tuple[float, Counter[str]]] = []  # as the first that counts is sent, and the first after them
    enough = asyncio.Event()
    numbers, waiting = count(), iter(chains)

    async def user(http: Any) -> None:
        for chain in waiting:
            for body in chain:
                number = next(numbers) - warm_up
                if number in (0, requests):
                    marks.append((time.perf_counter(), cpu_s()))
                answer = await send(http, body)
                if 0 <= number < requests:
                    counted.append(answer)
                if len(counted) == requests and len(marks) == 2:
                    enough.set()

    async with session(_TIMEOUT_S) as http:
        users = [asyncio.create_task(user(http)) for _ in range(in_flight)]
        last, everyone = asyncio.create_task(enough.wait()), asyncio.gather(*users)
        both: list[asyncio.Future[Any]] = [last, everyone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, *users, return_exceptions=True)
    if not enough.is_set():
        raise BadInput(f"the workload has {next(numbers)} requests, a trial needs {warm_up + requests + 1}")
    (begun, before), (ended, after) = marks
    found = summary(counted)
    found["requests_per_s"] = (requests - found["failures"]) / (ended - begun)
    found["tokens_per_s"] *= (max(a.end for a in counted) - min(a.start for a in counted)) / (ended - begun)
    cpu = {part: s - before[part] for part, s in after.items()}
    tokens = found["tokens_per_s"] * (ended - begun)
    found["engine_ms_per_token"] = 1000 * cpu.get("engines", 0.0) / max(tokens, 1.0)
    found["cpu_ms"] = {part: 1000 * s / requests for part, s in cpu.items()}  # a request
    unix_s = time.time() - time.perf_counter()
    found["span"] = [unix_s + begun, unix_s + max(a.end for a in counted)]
    return found | {"errors": errors(counted)}


def _even(trials: dict[str, dict[str, Any]], clock: NormalisedTime) -> dict[str, dict[str, Any]]:
    """The trials with METRICS and CPU times as they were at the cores' mean speed.

    Each also says what they were divided by: `slow`, and `slow_cpu` of CPU times, which the hypervisor did
    not take.
    """
    cases = [key.partition("/")[2] for key in trials]
    slowdowns = [clock.slowdown(*found["span"]) for found in trials.values()]
    took = [found["engine_ms_per_token"] for found in trials.values()]
    clock = clock.as_felt(felt(cases, slowdowns, took))
    even = {}
    for key, found in trials.items():
        start, end = found["span"]
        slow, slow_cpu = (end - start) / clock.seconds(start, end), clock.slowdown(start, end)
        by = dict.fromkeys(METRICS, slow) | {"requests_per_s": 1 / slow, "engine_ms_per_token": slow_cpu}
        even[key] = found | {name: found[name] / by[name] for name in METRICS}
        even[key]["cpu_ms"] = {part: ms / slow_cpu for part, ms in found["cpu_ms"].items()}
        even[key] |= {"slow": slow, "slow_cpu": slow_cpu}
    return even


def _rows(
    trials: dict[str, dict[str, Any]], systems: list[str], workloads: list[str]
) -> list[dict[str, Any]]:
    """Medians over rounds; `trials` by `ROUND/WORKLOAD/SYSTEM`."""
    rows = []
    by_case: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, found in trials.items():
        number, workload, system = key.split("/", 2)
        by_case.setdefault((workload, system), {})[number] = found
    for workload, system in product(workloads, systems):
        mine, ours = by_case.get((workload, system), {}), by_case.get((workload, OURS), {})
        if not mine:
            continue
        row: dict[str, Any] = {"workload": workload, "system": system, "rounds": len(mine)}
        for name in ("requests", "failures"):
            row[name] = sum(found[name] for found in mine.values())
        for name in METRICS:
            _put(row, name, [found[name] for found in mine.values()])
        for name in METRICS:
            pairs = [(ours[n][name], mine[n][name]) for n in mine if n in ours]
            if system != OURS and pairs:
                _put(row, f"ours_{name.removesuffix('_ms')}_pct", [100 * (a / b - 1) for a, b in pairs])
        for name in (*_STEPS, *(f"{name}_mean_ms" for name in _SERVER_TIMES)):
            if known := [found[name] for found in mine.values() if name in found]:
                row[name] = float(np.median(known))
        for part in sorted({part for found in mine.values() for part in found["cpu_ms"]}):
            of_part = [found["cpu_ms"].get(part, 0.0) for found in mine.values()]
            row[f"{part}_cpu_ms"] = float(np.median(of_part))
        rows.append(row)
    return rows


def _put(row: dict[str, Any], name: str, values: list[float]) -> None:
    row[name], row[f"{name}_low"], row[f"{name}_high"] = median_ci(values)


def _predictor(trace: CalibrationTrace, seed: int) -> tuple[bytes, set[str]]:
    """Fitted on CALIBRATION of the trace's prompts, and which those are."""
    if trace.token_ids is None:
        raise BadInput("the calibration trace has no token ids; make it with eldr calibrate")
    if len(trace.ids) < CALIBRATION:
        raise BadInput(f"the calibration trace has {len(trace.ids)} prompts, fewer than {CALIBRATION}")
    fit = trace.subset(np.random.default_rng(seed).permutation(len(trace.ids))[:CALIBRATION])
    return fit_signature_predictor(fit)[0].to_bytes(), set(fit.ids)


def _chosen(what: str, given: str, known: Sequence[str], needing: str, needed: Path | None) -> list[str]:
    """The names that were given, or all; those that begin with `needing` only where they have what they need.

    Raises:
        BadInput: a name that is none, or cannot run.
    """
    possible = [name for name in known if needed is not None or not name.startswith(needing)]
    for name in (names := given.split(",") if given else possible):
        if name not in known:
            raise BadInput(f"there is no {what} {name!r}; there are {', '.join(known)}")
        if name not in possible:
            raise BadInput(f"the {what} {name!r} needs an option that was not given (see --help)")
    return names


def whole_replicas(
    prompts: options.Prompts = options.PROMPTS,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration trace of these prompts; none: it is captured first.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake trace with prefix blocks; none: sessions are left out.")
    ] = None,
    vllm_router_venv: options.RouterVenv = None,
    systems: Annotated[str, typer.Option(help="Systems, with commas; default: all that can run.")] = "",
    workloads: Annotated[str, typer.Option(help="Workloads, with commas; default: all that can run.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Of all trials; 0: only print --record.")] = 3,
    in_flight: options.InFlight = 48,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests of a trial before those that count.")] = 64,
    requests: Annotated[int, typer.Option(min=4, help="Requests of a trial that count.")] = 160,
    burn_in: Annotated[int, typer.Option(min=4, help="Requests to engines that have just started.")] = 96,
    min_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at least.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 96,
    max_prompt_tokens: options.Longest = 128,
    intermediate: options.Intermediate = 1536,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    blocks: Annotated[int, typer.Option(min=64, help="KV blocks of an engine, of 16 tokens.")] = 4096,
    stream_interval: options.Interval = 4,
    deployment: options.Deployment = Path("deployments/cpu_demo_whole.yaml"),
    work: options.Work = options.WORK,
    record: options.Record = None,
    port: Annotated[int, typer.Option(help="First of 200 ports that are used.")] = 8600,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare policies of whole replicas with each other and with vllm-router's, live."""
    unwind_on_sigterm()
    allow_open_files(8192)
    wanted = _chosen("system", systems, SYSTEMS, "vllm-router", vllm_router_venv)
    loads = _chosen("workload", workloads, WORKLOADS, "sessions", trace)
    records = read_trace(trace) if trace else []
    if not all(found.hash_ids for found in records):
        raise BadInput(f"{trace} names no prefix blocks; give Mooncake's conversation trace")
    if calibration is None:
        observed = captured(prompts, work, requests=2400, seed=seed).trace
    else:
        observed = CalibrationTrace.load(calibration)
    predictor, fitted_on = _predictor(observed, seed)
    asked = [p for p in read_prompts([prompts]) if p.id not in fitted_on]
    asked = no_longer_than(balanced_sample(asked, 2000, seed), max_prompt_tokens, chat=False)
    inputs: dict[str, Any] = {
        "in_flight": in_flight, "warm_up": warm_up, "requests": requests, "burn_in": burn_in,
        "min_tokens": min_tokens, "max_tokens": max_tokens, "max_prompt_tokens": max_prompt_tokens,
        "intermediate": intermediate, "dtype": dtype, "blocks": blocks, "stream_interval": stream_interval,
        "deployment": deployment.stem, "prompts": prompts.name, "trace": trace.name if trace else None,
        "calibration_prompts": CALIBRATION,
    }  # fmt: skip
    journal = Journal(record, inputs) if record else None
    trials: dict[str, dict[str, Any]] = dict(journal.known) if journal else {}
    answers = range(min_tokens, max_tokens + 1)
    arguments = wide_arguments(deployment, widened(intermediate, work), stream_interval)
    # So that eight engines fit 24 GiB.
    arguments["decode_config"]["engine_kwargs"] |= {"dtype": dtype, "num_gpu_blocks_override": blocks}
    sizes = {"in_flight": in_flight, "warm_up": warm_up, "requests": requests}
    names = {side: [s.partition("/")[2] for s in wanted if s.startswith(f"{side}/")] for side in SIDES}
    with ExitStack() as stack:
        kept = record.with_suffix(".cpu_speed") if record else None
        speed = kept or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(rounds):
            order = random.Random(f"{seed}/{number}")
            cases = order.sample(list(product(loads, wanted)), k=len(loads) * len(wanted))
            left = [(load, system) for load, system in cases if f"{number}/{load}/{system}" not in trials]
            if not left:
                continue
            with probed(speed), ExitStack() as up:
                opened: dict[str, _Opened] = {}
                for side in (side for side in order.sample(SIDES, k=len(SIDES)) if names[side]):
                    if side == "eldr":
                        opened[side] = up.enter_context(_ours(arguments, predictor, port))
                    else:
                        assert vllm_router_venv is not None
                        servers = _theirs(arguments, vllm_router_venv, names[side], port + 20)
                        opened[side] = up.enter_context(servers)
                for side, (chosen, _) in opened.items():
                    tag = f"{order.getrandbits(32):08x}"
                    chains = many_domains(
                        asked, answers, random.Random(tag), tag=tag, count=burn_in + 2 * in_flight
                    )
                    first = chosen("round-robin" if side == "eldr" else names[side][0])
                    asyncio.run(_trial(first, chains, in_flight=in_flight, warm_up=1, requests=burn_in - 1))
                bar = up.enter_context(progress_bar())
                for load, system in bar.track(left, description=f"round {number + 1} of {rounds}"):
                    # Requests are those of the round and workload; only what they begin with is the trial's.
                    tag = f"{order.getrandbits(32):08x}"
                    chains = _chains(load, asked, records, answers, f"{seed}/{number}/{load}", tag, sizes)
                    side, _, name = system.partition("/")
                    chosen, totals = opened[side]
                    send, before = chosen(name), totals()
                    found = asyncio.run(_trial(send, chains, **sizes)) | _means(before, totals())
                    trials[f"{number}/{load}/{system}"] = found
                    if journal:
                        journal.put(f"{number}/{load}/{system}", found)
        if not trials:
            raise BadInput("there is no trial to report")
        even = _even(trials, NormalisedTime.read(speed))
    rows = [
        {"clock": clock, **row}
        for clock, told in (("wall", trials), ("even", even))
        for row in _rows(told, wanted, loads)
    ]
    slow = {key: {name: found[name] for name in ("slow", "slow_cpu")} for key, found in even.items()}
    publish(
        "whole_replicas", rows,
        inputs=inputs | {"trials": {key: found | slow[key] for key, found in trials.items()}},
        seed=seed, out=out,
        notes="closed loop, greedy; two sets of four whole engines, one of which has requests at a time, "
        "share the cores with the client and what serves them; cpu_ms has what both sets take when idle",
    )  # fmt: skip


def _chains(
    load: str,
    prompts: list[Prompt],
    records: list[Any],
    answers: range,
    seed: str,
    tag: str,
    sizes: dict[str, int],
) -> Chains:
    """Of a workload, as many as a trial can need."""
    rng, most = random.Random(seed), sizes["warm_up"] + sizes["requests"] + 4 * sizes["in_flight"]
    if load == "sessions":
        return sessions(records, prompts, answers, rng, tag=tag, count=most)
    make = many_domains if load == "many domains" else system_prompts
    return make(prompts, answers, rng, tag=tag, count=most)


if __name__ == "__main__":
    run(whole_replicas)
