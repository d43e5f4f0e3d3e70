"""Serve the demo model on a small machine, compare three policies, and write a report.

    eldr demo            (or: make demo)

The demo starts its own Ray cluster and application, and stops both at the end or when interrupted. With
--keep the service continues after the report until Ctrl-C.

The load is a closed loop, so that decode batches are large enough for placement to matter, and experts are
so wide that they must be read from memory. Policies alternate in many short rounds. The first figures show
the direct effects of placement, which other load on the cores does not change: the experts that a decode
step reads, and the CPU time of the engines' own threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.data_root import ROOT
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.files import write_atomically
from loadgen import application
from loadgen.figures import describe_intervals, policy_rows
from loadgen.gpu_steps import add_gpu_steps
from loadgen.greedy import GREEDY_TOKENS, differing_answers, greedy_sentence
from loadgen.plots import signature_space
from loadgen.report import distributions, figures_table, load_over_time, placement_effects, render_page
from loadgen.results import environment, print_table, write_result
from loadgen.sentences import client_sentences, step_sentences
from loadgen.statistics import LatencyObjective
from loadgen.trial import LoadSpec, ScheduledTrial, Trial, run_trial, schedule_trials
from loadgen.workload import balanced_sample, read_prompts
from offline.demo_arguments import demo_arguments

KEY = "demo"
POLICIES = ["shortest-queue", "marginal-cost", "locality-band"]
console = Console()
_LINE_S = 15.0  # time between two lines about a running step, if the output is not a terminal
_MAX_TABLE_LOADS = 6  # maximum number of loads for the routing table
_TABLE_S = 30.0  # time limit for the routing table once there are enough samples
_SHOWN_COLUMNS = (
    "active_experts",
    "experts_per_token",
    "engine_ms_per_token",
    "h100_ms_per_token",
    "batch_size",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "requests",
    "failures",
    "most_similar_worker_share",
)


@dataclass(frozen=True)
class _Plan:
    """The settings of a run."""

    arguments: dict[str, Any]  # arguments of the deployment's application
    load: LoadSpec
    rounds: int
    greedy: int
    out: Path
    seed: int
    table_load_s: int = 8

    @property
    def clock(self) -> str:
        """Return the name of the time that engines report for a decode step."""
        kind = self.arguments["decode_config"].get("accelerator_config", {}).get("kind")
        return "CPU time" if kind == "cpu" else "engine time"

    @property
    def model(self) -> str:
        """Return the name of the model's folder."""
        return Path(self.arguments["decode_config"]["model_loading_config"]["model_source"]).name

    @property
    def hardware(self) -> str:
        """Return the hardware that all engines share, in words."""
        gpu = "one GPU and " if self.clock != "CPU time" else ""
        return f"{gpu}{os.cpu_count()} cores"

    @property
    def engines(self) -> tuple[int, int]:
        """Return the numbers of prefill and decode engines."""
        configs = (self.arguments[role]["deployment_config"] for role in ("prefill_config", "decode_config"))
        prefill, decode = (int(config["num_replicas"]) for config in configs)
        return prefill, decode


@contextmanager
def _show_step(what: str) -> Iterator[Callable[[str], None]]:
    """Show a running step, its progress through the yielded function, and finally its duration.

    Without a terminal, print a line every `_LINE_S` seconds instead of a spinner.
    """
    start = last = time.perf_counter()
    with console.status(f"{what} ...") as status:

        def log(detail: str) -> None:
            nonlocal last
            seconds = time.perf_counter() - start
            status.update(f"{what}: {detail} ({seconds:.0f} s)")
            if not console.is_terminal and time.perf_counter() - last > _LINE_S:
                last = time.perf_counter()
                console.print(f"... {what}: {detail} ({seconds:.0f} s)", soft_wrap=True)

        yield log
    console.print(f"[green]done[/] {what} ({time.perf_counter() - start:.0f} s)")


def _start_command(module: str, *arguments: object, log: Path) -> Callable[[], None]:
    """Start one of the project's commands and return a function that waits for its end.

    The function raises UserInputError with the last line of the log if the command fails.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stderr=file,
            env=os.environ | {"RAY_ADDRESS": "auto"},
        )

    def wait() -> None:
        if process.wait():
            last = (log.read_text().strip().splitlines() or ["no output"])[-1]
            raise UserInputError(f"{module} failed: {last} (all of it in {log})")

    return wait


@contextmanager
def _application(
    plan: _Plan, port: int, dashboard: bool, wait_for_model: Callable[[], None]
) -> Iterator[OperatorClient]:
    application.check_port(port)
    prefill, decode = plan.engines
    try:
        with _show_step(f"starting the engines ({prefill} prefill, {decode} decode)") as log:
            service, address = application.start(
                plan.arguments, port, KEY, dashboard=dashboard, log=log, before_deploy=wait_for_model
            )
        if dashboard:
            console.print(f"Ray's dashboard: {address}", soft_wrap=True)
        yield service
    finally:
        with _show_step("stopping everything"):
            application.stop()


def _start_widening(intermediate: int, out: Path) -> tuple[Path, Callable[[], None]]:
    """Start widening the demo model's experts. Return the folder and a function that waits for the end."""
    if intermediate <= 32:
        return ROOT / "examples/demo_model/weights", lambda: None
    folder = (out / f"model_{intermediate}").resolve()
    if (folder / "config.json").exists():
        return folder, lambda: None
    arguments = ("--intermediate", intermediate, "--out", folder)
    return folder, _start_command("offline.widen", *arguments, log=out / "widen.log")


def _run_load(
    service: OperatorClient, plan: _Plan, step: ScheduledTrial, load: LoadSpec, *, what: str
) -> Trial:
    with _show_step(what) as log:
        whole_s = load.warm_up_s + load.seconds

        def tick(elapsed_s: float) -> None:
            sent = f"{elapsed_s:.0f} of {whole_s} s of requests"
            log(sent if elapsed_s < whole_s else "waiting for the last answers")

        return run_trial(service, step, load, scratch=plan.out, tick=tick)


def _wait_for_table(service: OperatorClient, log: Callable[[str], None]) -> tuple[bool, str]:
    """Wait for a routing table if there are enough samples for one. Return whether it is live, and a note."""
    deadline = time.monotonic() + _TABLE_S
    while True:
        status = service.status()
        pool = status["signatures"]
        gives_up = pool["samples"] < pool["needed"] or pool["last_refusal"] or time.monotonic() > deadline
        if status["table"] or gives_up:
            return bool(status["table"]), pool["note"]
        log(pool["note"])
        time.sleep(0.5)


def _make_table(service: OperatorClient, plan: _Plan) -> tuple[Path, Path]:
    """Warm up the engines, placing by queue length, until the service has fitted a routing table.

    Returns:
        The files of the calibration trace and of the table.
    """
    load = replace(
        plan.load,
        warm_up_s=0,
        max_tokens=max(1, plan.load.max_tokens // 2),  # with shorter answers more requests end
        min_tokens=max(1, plan.load.min_tokens // 2),
    )
    what = "load from which the service fits its routing table"
    seconds = [plan.table_load_s * (number + 1) for number in range(_MAX_TABLE_LOADS)]
    for number, seconds_of_load in enumerate(seconds):  # on a slow machine few answers end in a short load
        step = ScheduledTrial(number, 0, POLICIES[0], seed=number)
        _run_load(service, plan, step, replace(load, seconds=seconds_of_load), what=what)
        with _show_step("waiting for the routing table") as log:
            live, note = _wait_for_table(service, log)
        if live:
            break
    else:
        raise UserInputError(f"no routing table after {sum(seconds)} s of load: {note}")
    trace, table = plan.out / "trace.safetensors", plan.out / "table.safetensors"
    write_atomically(trace, service.trace())
    write_atomically(table, service.table())
    return trace, table


def _measure_rounds(service: OperatorClient, plan: _Plan) -> list[Trial]:
    """Measure every policy once in each round, in random order."""
    trials = []
    for step in schedule_trials(POLICIES, plan.rounds, plan.seed):
        what = f"round {step.round + 1} of {plan.rounds}: {step.policy}"
        trial = _run_load(service, plan, replace(step, seed=1 + step.seed), plan.load, what=what)
        trials.append(trial)
        if e := trial.engines:
            batch, cost = e["requests"] / e["steps"], 1000 * e["seconds"] / e["requests"]
            console.print(
                f"     {e['active_experts'] / e['steps']:.1f} experts per step of {batch:.1f} requests, "
                f"{cost:.2f} ms of {plan.clock} per token",
                style="dim",
            )
        if not trial.measured_requests(plan.load.warm_up_s, plan.load.seconds):
            console.print(f"     no answer ended in the measured {plan.load.seconds} s: increase --seconds")
    return trials


def _compare_greedy(service: OperatorClient, plan: _Plan) -> str:
    with _show_step("greedy answers under every policy"):
        prompts = balanced_sample(read_prompts([Path(plan.load.prompts)]), plan.greedy, plan.seed)
        max_tokens = min(GREEDY_TOKENS, plan.load.max_tokens)
        differing = differing_answers(service, plan.load.model, POLICIES, prompts, max_tokens=max_tokens)
    sentence = greedy_sentence(differing, len(prompts))
    if any(differing.values()):
        raise UserInputError(sentence)
    return sentence


def _publish(plan: _Plan, trials: list[Trial], greedy: str, trace: Path, fitted: Path) -> None:
    """Print the figures, and write demo.json and report.html. Raise UserInputError if requests failed."""
    load = plan.load
    rows = policy_rows(
        POLICIES,
        trials,
        warm_up_s=load.warm_up_s,
        seconds=load.seconds,
        objective=LatencyObjective(1000, 100),
        seed=plan.seed,
    )
    sentences = step_sentences(rows, clock=plan.clock)
    calibration = CalibrationTrace.load(trace)
    prefill, decode = plan.engines
    remarks = [
        greedy,
        *add_gpu_steps(rows, calibration.decode_counts.shape[2]),
        *client_sentences(rows, plan.rounds),
        f"{prefill + decode} engines, the ingress and the load generator share {plan.hardware}, so "
        "what a client waits for is the work of all of them.",
    ]
    for text in [*sentences, *remarks]:
        console.print(text, style="bold" if text in sentences else None, soft_wrap=True, markup=False)
    table = figures_table(rows, _SHOWN_COLUMNS)
    print_table("the same stream of prompts under three policies", table, lines=True)
    intervals = describe_intervals(plan.rounds)
    notes = f"closed loop; all engines share this machine's {plan.hardware}; {intervals}; {greedy}"
    inputs = {
        "prompts": Path(load.prompts).name,
        "in_flight": load.users,
        "seconds": load.seconds,
        "warm_up_s": load.warm_up_s,
        "rounds": plan.rounds,
        "max_tokens": load.max_tokens,
        "min_tokens": load.min_tokens,
        "decode_engines": decode,
        "model": plan.model,
    }
    write_result(plan.out / "demo.json", "demo", rows, inputs=inputs, seed=plan.seed, notes=notes)
    content = render_page(
        "eldr-serve demo",
        table,
        f"[low, high]: 95 % interval; below it, the change against {POLICIES[0]}. {notes}",
        [
            ("Signature space", signature_space(calibration, RoutingTable.load(fitted))),
            (
                "Time per output token and to the first",
                distributions(POLICIES, trials, load.warm_up_s, load.seconds),
            ),
            ("Load", load_over_time(POLICIES, trials)),
        ],
        inputs | environment(),
        sentences=sentences,
        lead=("What placement changes in the engines", placement_effects(rows, trials, plan.clock)),
        remarks=remarks,
    )
    write_atomically(report := plan.out / "report.html", content)
    console.print(f"report: {report}; figures: {plan.out / 'demo.json'}", soft_wrap=True)
    if failures := sum(row["failures"] for row in rows):
        raise UserInputError(f"{failures} requests failed; see {plan.out}/locust.log")


def _wait_for_interrupt(what: str) -> None:
    console.print(what, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def demo(
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL file or folder of prompts with domains.", show_default="the demo model's"),
    ] = ROOT / "examples/demo_model/prompts",
    deployment: Annotated[
        Path, typer.Option(help="Deployment YAML.", show_default="the bundled cpu_demo.yaml")
    ] = ROOT / "deployments/cpu_demo.yaml",
    decode_engines: Annotated[
        int, typer.Option(min=0, help="Decode engines, with 0.25 GiB of KV cache each; 0: as deployed.")
    ] = 3,
    intermediate: Annotated[
        int, typer.Option(min=32, help="Neurons per expert, widened with zeros; 32: the model as it is.")
    ] = 1024,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests always in flight (closed loop).")] = 36,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request, at most.")] = 96,
    seconds: Annotated[int, typer.Option(min=2, help="Measured part of a trial, s.")] = 5,
    warm_up_seconds: Annotated[int, typer.Option(min=0, help="Load before the measured part, s.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Trials of each policy, in turn.")] = 6,
    first_table: Annotated[
        int, typer.Option(min=16, help="Requests from which the service fits its routing table.")
    ] = 120,
    table_seconds: Annotated[
        int, typer.Option(min=1, help="Load for the first routing table, s; repeated, longer each time.")
    ] = 8,
    greedy: Annotated[int, typer.Option(min=1, help="Prompts whose greedy answers are compared.")] = 5,
    port: Annotated[int, typer.Option(help="HTTP port; the next one is Serve's proxy's.")] = 8000,
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo writes.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and clustering.")] = 0,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Move the deployment's engines to one GPU, which they share.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep serving after the report, with Ray's dashboard.")
    ] = False,
) -> None:
    """Serve the demo model and compare shortest-queue, marginal-cost and locality-band on it."""
    out.mkdir(parents=True, exist_ok=True)
    model, wait_for_model = _start_widening(intermediate, out)
    load = LoadSpec(
        str(prompts),
        "eldr-demo",
        0.0,
        seconds,
        warm_up_seconds,
        in_flight,
        max_tokens,
        temperature=0.8,
        min_tokens=max(1, max_tokens // 2),
        abandon=True,
    )
    arguments = demo_arguments(deployment, model, decode_engines, first_table, gpu=gpu)
    plan = _Plan(arguments, load, rounds, greedy, out, seed, table_seconds)
    with _application(plan, port, keep, wait_for_model) as service:
        trace, fitted = _make_table(service, plan)
        equal = _compare_greedy(service, plan)
        _publish(plan, _measure_rounds(service, plan), equal, trace, fitted)
        if keep:
            _wait_for_interrupt(f"serving at {service.url} until Ctrl-C; admin key: {KEY}")


if __name__ == "__main__":
    run(demo)
