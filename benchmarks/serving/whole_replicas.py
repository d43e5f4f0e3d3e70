"""Compare policies for whole replicas with vllm-router's on plain vLLM servers, live, on three workloads.

    python -m venv router-venv && router-venv/bin/pip install vllm-router==0.1.17
    eldr calibrate --deployment deployments/cpu_demo_whole.yaml --prompts DIR --out calibration.safetensors
    python -m benchmarks.serving.whole_replicas --calibration calibration.safetensors --prompts DIR \\
        --trace mooncake_conversation.jsonl.gz --vllm-router-venv router-venv --record trials.jsonl

Two sets of four engines run: the deployment's behind its ingress, whose policy changes with each trial
(`eldr/POLICY`), and plain vLLM servers of the same model and settings, without a KV connector, behind one
vllm-router per policy in its regular mode (`vllm-router/POLICY`). Only one set has requests at a time. The
workloads are in `benchmarks/lib/whole/workloads.py`. `prefix-affinity` is
benchmarks.papers.prefix_policies:LongestPrefix, a usual rule of cache-aware balancers.

The loop is closed. A trial begins with empty prefix caches, since its prompts begin with a text of their own,
and with a policy without history. The predictor is fitted to prompts that no trial uses, and learns from
trial to trial. The first requests of a trial, while caches fill and workers specialise, do not count.

Each round starts new engines and runs every system on every workload once, in random order. Rows are medians
over rounds with 95 % intervals. A row with `clock` wall has wall-clock times. A row with `clock` normalised
has times normalised for CPU speed (benchmarks/lib/normalised_time.py). `--record` keeps the trials, and
beside them the cores' speed, so that a stopped run can resume.

    ours_KEY_pct            how far `eldr/marginal-cost` is above the row's system in the same round, median
                            and interval; negative favours eldr_serve, except for requests/s
    engine_ms_per_token     CPU time of the engines' processes, including prefill
    server_..._mean_ms      metrics of the plain servers over a whole trial
    active_experts          mean over the decode steps of eldr_serve's engines in a trial
    batch_size              mean over the same steps
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import count, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import load_or_capture
from benchmarks.lib.client import (
    Answer,
    Send,
    allow_open_files,
    count_failures,
    open_session,
    summarise_answers,
)
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.cpu_speed import record_cpu_speed
from benchmarks.lib.cpu_time import cpu_s
from benchmarks.lib.live import wide_arguments
from benchmarks.lib.normalised_time import NORMALISED, NormalisedTime
from benchmarks.lib.prompts import no_longer_than
from benchmarks.lib.replay.schedule import widen_model
from benchmarks.lib.whole.report import means, normalise_speed, rows
from benchmarks.lib.whole.systems import POLICIES, Engines
from benchmarks.lib.whole.workloads import Chains, many_domains, sessions, system_prompts
from eldr_serve.commands.run import run
from eldr_serve.commands.settings import command_of_settings
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from loadgen.journal import Journal
from loadgen.progress import progress_bar
from loadgen.results import publish
from loadgen.traces import RecordedArrival, read_arrival_trace
from loadgen.workload import WorkloadPrompt, balanced_sample, read_prompts
from offline.predictor import fit_signature_predictor

BENCHMARKS = {"whole_replicas": "all"}
WORKLOADS = ("many domains", "sessions", "system prompts")
ROUTER_POLICIES = ("cache_aware", "power_of_two", "round_robin", "consistent_hash")
SIDES = ("eldr", "vllm-router")
SYSTEMS = [f"eldr/{name}" for name in POLICIES] + [f"vllm-router/{name}" for name in ROUTER_POLICIES]
CALIBRATION = 300  # prompts that the predictor is fitted on
_TIMEOUT_S = 60.0  # slower requests count as failed
# Settings on which no trial depends.
_OTHER_SETTINGS = {"vllm_router_venv", "systems", "workloads", "rounds", "work", "record", "port", "out"}


async def _trial(
    send: Send, chains: Chains, *, in_flight: int, warm_up: int, requests: int
) -> dict[str, Any]:
    """Measure the `requests` that are sent after the first `warm_up`. The loop continues until they end.

    So the same requests count for all systems. Requests/s and CPU times refer to the span in which these
    requests were sent.
    """
    counted_answers: list[Answer] = []
    marks: list[tuple[float, Counter[str]]] = []  # start of the counted requests, start of later ones
    enough = asyncio.Event()
    request_numbers, next_chains = count(), iter(chains)

    async def run_user(session: Any) -> None:
        for chain in next_chains:
            for body in chain:
                number = next(request_numbers) - warm_up
                if number in (0, requests):
                    marks.append((time.perf_counter(), cpu_s()))
                answer = await send(session, body)
                if 0 <= number < requests:
                    counted_answers.append(answer)
                if len(counted_answers) == requests and len(marks) == 2:
                    enough.set()

    async with open_session(_TIMEOUT_S) as session:
        users = [asyncio.create_task(run_user(session)) for _ in range(in_flight)]
        ends: list[asyncio.Future[Any]] = [asyncio.create_task(enough.wait()), asyncio.gather(*users)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, *users, return_exceptions=True)
    if not enough.is_set():
        raise UserInputError(
            f"the workload has {next(request_numbers)} requests, but a trial needs {warm_up + requests + 1}"
        )
    (begin_s, before), (end_s, after) = marks
    row = summarise_answers(counted_answers)
    row["requests_per_s"] = (requests - row["failures"]) / (end_s - begin_s)
    last_end_s = max(a.ended_at_s for a in counted_answers)
    row["tokens_per_s"] *= (last_end_s - min(a.started_at_s for a in counted_answers)) / (end_s - begin_s)
    cpu = {part: s - before[part] for part, s in after.items()}
    tokens = row["tokens_per_s"] * (end_s - begin_s)
    row["engine_ms_per_token"] = 1000 * cpu.get("engines", 0.0) / max(tokens, 1.0)
    row["cpu_ms"] = {part: 1000 * s / requests for part, s in cpu.items()}  # CPU time of a request
    unix_s = time.time() - time.perf_counter()
    row["span"] = [unix_s + begin_s, unix_s + last_end_s]
    return row | {"errors": count_failures(counted_answers)}


def _predictor(trace: CalibrationTrace, seed: int) -> tuple[bytes, set[str]]:
    """Fit a predictor to CALIBRATION of the trace's prompts, and return it with their ids."""
    if trace.token_ids is None:
        raise UserInputError("the calibration trace has no token ids; make it with eldr calibrate")
    if len(trace.ids) < CALIBRATION:
        raise UserInputError(f"the calibration trace has {len(trace.ids)} prompts, fewer than {CALIBRATION}")
    fit = trace.subset_without_routes(np.random.default_rng(seed).permutation(len(trace.ids))[:CALIBRATION])
    return fit_signature_predictor(fit)[0].to_bytes(), set(fit.ids)


def _choose(what: str, names: str, known: Sequence[str], prefix: str, option: Path | None) -> list[str]:
    """Return the names of a comma-separated list, or all that can run if it is empty.

    Args:
        known: all names.
        prefix: names with this prefix can run only with the `option`.

    Raises:
        UserInputError: a name is unknown or cannot run.
    """
    possible = [name for name in known if option is not None or not name.startswith(prefix)]
    chosen = names.split(",") if names else possible
    for name in chosen:
        if name not in known:
            raise UserInputError(f"there is no {what} {name!r}; there are {', '.join(known)}")
        if name not in possible:
            raise UserInputError(f"the {what} {name!r} needs an option that was not given (see --help)")
    return chosen


Calibration = Annotated[Path | None, typer.Option(help="Calibration trace of the prompts; none: a capture.")]
Trace = Annotated[Path | None, typer.Option(help="Mooncake trace with prefix blocks; none: no sessions.")]


@dataclass(frozen=True)
class ComparisonSettings:
    """The options of the command."""

    prompts: options.Prompts = options.PROMPTS
    calibration: Calibration = None
    trace: Trace = None
    vllm_router_venv: options.RouterVenv = None
    systems: Annotated[str, typer.Option(help="Systems, comma-separated; all that run if empty.")] = ""
    workloads: Annotated[str, typer.Option(help="Workloads, comma-separated; all that run if empty.")] = ""
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of all trials; 0: only print --record.")] = 3
    in_flight: options.InFlight = 48
    warm_up: Annotated[int, typer.Option(min=1, help="First requests of a trial, which do not count.")] = 64
    requests: Annotated[int, typer.Option(min=4, help="Requests of a trial that count.")] = 160
    burn_in: Annotated[int, typer.Option(min=4, help="Requests to new engines before a trial.")] = 96
    min_tokens: Annotated[int, typer.Option(min=2, help="Minimum tokens of an answer.")] = 32
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 96
    max_prompt_tokens: options.Longest = 128
    intermediate: options.Intermediate = 1536
    dtype: Annotated[str, typer.Option(help="Data type of weights and activations.")] = "bfloat16"
    blocks: Annotated[int, typer.Option(min=64, help="KV blocks of an engine, of 16 tokens.")] = 4096
    stream_interval: options.Interval = 4
    deployment: options.Deployment = Path("deployments/cpu_demo_whole.yaml")
    work: options.Work = options.WORK
    record: options.Record = None
    port: Annotated[int, typer.Option(help="First of 200 ports that are used.")] = 8600
    seed: options.Seed = 0
    out: options.Out = None

    def inputs(self) -> dict[str, Any]:
        """Return the settings on which a trial depends, with files by name, for results and journals."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OTHER_SETTINGS}
        names = {name: value.name if isinstance(value, Path) else value for name, value in values.items()}
        return names | {"calibration_prompts": CALIBRATION}


@command_of_settings
def whole_replicas(settings: ComparisonSettings) -> None:
    """Compare policies of whole replicas with each other and with vllm-router's, live."""
    unwind_on_sigterm()
    allow_open_files(8192)
    systems = _choose("system", settings.systems, SYSTEMS, "vllm-router", settings.vllm_router_venv)
    workloads = _choose("workload", settings.workloads, WORKLOADS, "sessions", settings.trace)
    comparison = _prepare(settings, systems)
    trials, clock = comparison.measure(list(product(workloads, systems)))
    _publish(trials, clock, systems, workloads, settings)


def _prepare(settings: ComparisonSettings, systems: list[str]) -> _Comparison:
    """Read the inputs, fit the predictor and widen the model. Raise UserInputError for unusable inputs."""
    records = read_arrival_trace(settings.trace) if settings.trace else []
    if not all(record.hash_ids for record in records):
        raise UserInputError(f"{settings.trace} names no prefix blocks; give Mooncake's conversation trace")
    if settings.calibration:
        calibration = CalibrationTrace.load(settings.calibration)
    else:
        calibration = load_or_capture(
            settings.prompts, settings.work, requests=2400, seed=settings.seed
        ).trace
    predictor, fitted_ids = _predictor(calibration, settings.seed)
    held_out = balanced_sample(
        [prompt for prompt in read_prompts([settings.prompts]) if prompt.id not in fitted_ids],
        2000,
        settings.seed,
    )
    model = widen_model(settings.intermediate, settings.work)
    arguments = wide_arguments(settings.deployment, model, settings.stream_interval)
    # With this size eight engines fit into 24 GiB.
    memory = {"dtype": settings.dtype, "num_gpu_blocks_override": settings.blocks}
    arguments["decode_config"]["engine_kwargs"] |= memory
    return _Comparison(
        settings,
        Engines(arguments, predictor, settings.vllm_router_venv, settings.port),
        {side: [s.partition("/")[2] for s in systems if s.startswith(f"{side}/")] for side in SIDES},
        no_longer_than(held_out, settings.max_prompt_tokens, chat=False),
        records,
    )


@dataclass(frozen=True)
class _Comparison:
    """The comparison before it runs.

    Attributes:
        policies: names of the policies of each side.
        prompts: prompts to which the predictor was not fitted.
        records: requests of the Mooncake trace; empty if there is no trace.
    """

    settings: ComparisonSettings
    engines: Engines
    policies: dict[str, list[str]]
    prompts: list[WorkloadPrompt]
    records: list[RecordedArrival]

    def measure(self, cases: list[tuple[str, str]]) -> tuple[dict[str, dict[str, Any]], NormalisedTime]:
        """Measure each (workload, system) in each round, except for the trials that `--record` has.

        Returns:
            All trials by `ROUND/WORKLOAD/SYSTEM`, with those of `--record`, and the normalised time.

        Raises:
            UserInputError: there is no trial.
        """
        record = self.settings.record
        journal = Journal(record, self.settings.inputs()) if record else None
        trials: dict[str, dict[str, Any]] = dict(journal.entries) if journal else {}

        def keep(key: str, row: dict[str, Any]) -> None:
            trials[key] = row
            if journal:
                journal.put(key, row)

        with ExitStack() as stack:
            if record:
                cpu_speed = record.with_suffix(".cpu_speed")
            else:
                cpu_speed = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for number in range(self.settings.rounds):
                order = random.Random(f"{self.settings.seed}/{number}")
                shuffled = order.sample(cases, k=len(cases))
                missing = [case for case in shuffled if f"{number}/{'/'.join(case)}" not in trials]
                if missing:
                    with record_cpu_speed(cpu_speed):
                        self._measure_round(number, missing, order, keep)
            if not trials:
                raise UserInputError("there is no trial to report")
            return trials, NormalisedTime.read(cpu_speed)

    def _measure_round(
        self,
        number: int,
        cases: list[tuple[str, str]],
        order: random.Random,
        keep: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Start both sides and keep a trial of each (workload, system)."""
        with ExitStack() as stack:
            sides = {
                side: stack.enter_context(self.engines.start(side, self.policies[side]))
                for side in order.sample(SIDES, k=len(SIDES))
                if self.policies[side]
            }
            for side, (select_policy, _) in sides.items():
                first = "round-robin" if side == "eldr" else self.policies[side][0]
                self._burn_in(select_policy(first), order)
            bar = stack.enter_context(progress_bar())
            for workload, system in bar.track(cases, description=f"round {number + 1}"):
                # Requests depend on round and workload; only the text at their beginning is the trial's own.
                tag, text = f"{order.getrandbits(32):08x}", f"{self.settings.seed}/{number}/{workload}"
                chains = self._chains(workload, random.Random(text), tag)
                side, _, policy = system.partition("/")
                select_policy, read_totals = sides[side]
                send, before = select_policy(policy), read_totals()
                row = self._run_trial(send, chains, self.settings.warm_up, self.settings.requests)
                keep(f"{number}/{workload}/{system}", row | means(before, read_totals()))

    def _chains(self, workload: str, rng: random.Random, tag: str) -> Chains:
        """Return as many chains of a workload as a trial can need."""
        settings = self.settings
        max_requests = settings.warm_up + settings.requests + 4 * settings.in_flight
        if workload == "sessions":
            return sessions(self.records, self.prompts, self._answer_tokens, rng, tag=tag, count=max_requests)
        make_chains = many_domains if workload == "many domains" else system_prompts
        return make_chains(self.prompts, self._answer_tokens, rng, tag=tag, count=max_requests)

    def _burn_in(self, send: Send, order: random.Random) -> None:
        """Send requests that no figure includes."""
        settings = self.settings
        tag, max_requests = f"{order.getrandbits(32):08x}", settings.burn_in + 2 * settings.in_flight
        rng = random.Random(tag)
        chains = many_domains(self.prompts, self._answer_tokens, rng, tag=tag, count=max_requests)
        self._run_trial(send, chains, warm_up=1, requests=settings.burn_in - 1)

    def _run_trial(self, send: Send, chains: Chains, warm_up: int, requests: int) -> dict[str, Any]:
        in_flight = self.settings.in_flight
        return asyncio.run(_trial(send, chains, in_flight=in_flight, warm_up=warm_up, requests=requests))

    @property
    def _answer_tokens(self) -> range:
        """Return the possible numbers of tokens of an answer."""
        return range(self.settings.min_tokens, self.settings.max_tokens + 1)


def _publish(
    trials: dict[str, dict[str, Any]],
    clock: NormalisedTime,
    systems: list[str],
    workloads: list[str],
    settings: ComparisonSettings,
) -> None:
    """Publish the rows in wall-clock time and at the cores' mean speed."""
    normalised = normalise_speed(trials, clock)
    table = [
        {"clock": name, **row}
        for name, by_clock in (("wall", trials), (NORMALISED, normalised))
        for row in rows(by_clock, systems, workloads)
    ]
    divisors = {
        key: {name: trial[name] for name in ("slow", "slow_cpu")} for key, trial in normalised.items()
    }
    publish(
        "whole_replicas",
        table,
        inputs=settings.inputs() | {"trials": {key: trial | divisors[key] for key, trial in trials.items()}},
        seed=settings.seed,
        out=settings.out,
        notes="Closed loop, greedy. Two sets of four whole replicas share the cores with the client and the "
        "serving layer, and one set has requests at a time. cpu_ms includes the idle cost of both sets.",
    )


if __name__ == "__main__":
    run(whole_replicas)
