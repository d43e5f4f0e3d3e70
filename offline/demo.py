"""The whole product on one small machine: serve, calibrate, fit, swap, compare three policies, report.

    eldr demo            (or: make demo)

Starts a Ray cluster and the application of its own, and stops both at the end, also when interrupted.
With --keep the service goes on after the report, until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from eldr_serve.artifacts import RoutingTable
from eldr_serve.calibration_trace import CalibrationTrace
from eldr_serve.client import Client
from eldr_serve.files import write_whole
from eldr_serve.home import ROOT
from loadgen import application
from loadgen.answers import answers
from loadgen.figures import method, policy_rows
from loadgen.report import distributions, load_over_time, page
from loadgen.trial import Shape, Trial, drive
from tools.cli import BadInput, run
from tools.plots import signature_space
from tools.results import environment, print_table, write_result
from tools.stats import Slo

KEY = "demo"
console = Console()
_LINE_S = 15.0  # between lines on what a step waits for, where the output is not a terminal
_COLUMNS = (
    "policy", "requests", "failures", "ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms", "active_experts",
    "batch_size", "best_worker_share",
)  # fmt: skip


@contextmanager
def _step(what: str) -> Iterator[Callable[[str], None]]:
    """Show that this step runs and, through the yielded function, how far it is; then how long it took.

    Where the output is no terminal, a line each `_LINE_S` seconds takes the place of the spinner.
    """
    start = last = time.perf_counter()
    with console.status(f"{what} ...") as status:

        def tell(detail: str) -> None:
            nonlocal last
            seconds = time.perf_counter() - start
            status.update(f"{what}: {detail} ({seconds:.0f} s)")
            if not console.is_terminal and time.perf_counter() - last > _LINE_S:
                last = time.perf_counter()
                console.print(f"... {what}: {detail} ({seconds:.0f} s)", soft_wrap=True)

        yield tell
    console.print(f"[green]done[/] {what} ({time.perf_counter() - start:.0f} s)")


def _command(module: str, *arguments: object, log: Path) -> None:
    """Run a command of ours, its progress on the terminal; BadInput with its last line if it fails."""
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            stderr=file,
            env=os.environ | {"RAY_ADDRESS": "auto"},
            check=False,
        )
    if done.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise BadInput(f"{module} failed: {last} (all of it in {log})")


@contextmanager
def _application(deployment: Path, model: Path, port: int, dashboard: bool) -> Iterator[Client]:
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["model_loading_config"]["model_source"] = str(model)
    application.check_port(port)
    try:
        with _step("starting the engines (1 prefill, 2 decode)") as tell:
            service, address = application.start(arguments, port, KEY, dashboard=dashboard, tell=tell)
        if dashboard:
            console.print(f"Ray's dashboard: {address}", soft_wrap=True)
        yield service
    finally:
        with _step("stopping everything"):
            application.stop()


def _report(
    out: Path,
    rows: list[dict[str, Any]],
    answered: list[str],
    trials: list[Trial],
    trace: Path,
    fitted: Path,
    seconds: int,
) -> Path:
    """A self-contained HTML page: the table, the signature space, TPOT and load over time."""
    policies = [row["policy"] for row in rows]
    path = out / "report.html"
    content = page(
        "eldr-serve demo",
        [{name: row[name] for name in _COLUMNS} for row in rows],
        "Two engines share two cores here, so times are noisy; active experts are not.",
        [
            ("Signature space", signature_space(CalibrationTrace.load(trace), RoutingTable.load(fitted))),
            ("Time to first token and per output token", distributions(policies, trials, 0, seconds)),
            ("Load", load_over_time(policies, trials)),
        ],
        environment(),
        answers=answered,
    )
    write_whole(path, content)
    return path


def _until_interrupted(what: str) -> None:
    console.print(what, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def demo(
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL file or folder of prompts with domains.", show_default="the demo model's"),
    ] = ROOT / "demo_model/prompts",
    deployment: Annotated[
        Path, typer.Option(help="Deployment YAML.", show_default="cpu_demo.yaml, which comes along")
    ] = ROOT / "deployments/cpu_demo.yaml",
    intermediate: Annotated[
        int, typer.Option(min=32, help="Neurons an expert, by widening with zeros; 32 is the model as it is.")
    ] = 512,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests/s, Poisson arrivals.")] = 2.0,
    users: Annotated[int, typer.Option(min=1, help="Requests in flight, at most.")] = 32,
    seconds: Annotated[int, typer.Option(min=5, help="Length of each stretch of load, s.")] = 15,
    rounds: Annotated[int, typer.Option(min=1, help="Stretches of each policy, in turn.")] = 2,
    calibration: Annotated[int, typer.Option(min=8, help="Prompts to calibrate on.")] = 100,
    port: Annotated[int, typer.Option(help="HTTP port; the next one is Serve's proxy's.")] = 8000,
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo writes.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and clustering.")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Serve on after the report, with Ray's dashboard, until Ctrl-C.")
    ] = False,
) -> None:
    """Serve the demo model and compare shortest-queue, locality-band and marginal-cost on it."""
    out.mkdir(parents=True, exist_ok=True)
    model = ROOT / "demo_model/weights"
    if intermediate > 32:
        with _step(f"widening the experts from 32 to {intermediate} neurons"):
            wide = (out / f"model_{intermediate}").resolve()
            if not (wide / "config.json").exists():
                size = ("--intermediate", intermediate)
                _command("demo_model.widen", *size, "--out", wide, log=out / "widen.log")
            model = wide
    trace, fitted = out / "trace.safetensors", out / "table.safetensors"
    policies = ("shortest-queue", "locality-band", "marginal-cost")
    trials = [Trial(policy, number) for number in range(rounds) for policy in policies]
    shape = Shape(str(prompts), "eldr-demo", rate, seconds, 0, users, max_tokens=64, temperature=0.8)
    with _application(deployment, model, port, keep) as service:
        console.print("calibrating: which experts do the prompts use?")
        _command(
            "offline.calibrate", "--deployment", deployment, "--prompts", prompts, "--out", trace,
            "--limit", calibration, "--max-tokens", 32, "--seed", seed, log=out / "calibrate.log",
        )  # fmt: skip
        console.print("fitting one cluster a decode worker, and swapping the table in")
        _command("offline.refit", "--trace", trace, "--swap", "--out", fitted, log=out / "refit.log")
        for number, trial in enumerate(trials):
            with _step(f"load under {trial.policy} ({number + 1} of {len(trials)})") as tell:

                def tick(elapsed_s: float, tell: Callable[[str], None] = tell) -> None:
                    sent = f"{elapsed_s:.0f} of {seconds} s of requests"
                    tell(sent if elapsed_s < seconds else "waiting for the last answers and the counters")

                drive(service, trial, shape, seed=1 + trial.round, scratch=out, tick=tick)
        rows = policy_rows(
            list(policies), trials, warm_up_s=0, seconds=seconds, slo=Slo(1000, 100), seed=seed
        )
        answered = answers(rows, rounds)
        for text in answered:
            console.print(text, style="bold", soft_wrap=True, markup=False)
        print_table("the same prompts under three policies", rows, columns=_COLUMNS)
        inputs = {
            "prompts": prompts.name, "rate": rate, "users": users, "seconds": seconds, "rounds": rounds,
            "intermediate": intermediate,
        }  # fmt: skip
        notes = f"open loop, Poisson arrivals; all engines share this machine's cores; {method(rounds)}"
        write_result(out / "demo.json", "demo", rows, inputs=inputs, seed=seed, notes=notes)
        report = _report(out, rows, answered, trials, trace, fitted, seconds)
        console.print(f"report: {report}; figures: {out / 'demo.json'}", soft_wrap=True)
        if any(row["failures"] for row in rows):
            raise BadInput(f"{sum(row['failures'] for row in rows)} requests failed; see {out}/locust.log")
        if keep:
            _until_interrupted(f"serving at {service.url} until Ctrl-C; admin key: {KEY}")


if __name__ == "__main__":
    run(demo)
