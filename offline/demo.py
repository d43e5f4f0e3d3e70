"""The whole product on one small machine: serve, calibrate, fit, swap, compare two policies, report.

    python -m offline.demo            (or: make demo)

Starts a Ray cluster and the application of its own, and stops both at the end, also when interrupted.
"""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.common import environment
from eldr_serve.artifacts import CalibrationTrace, RoutingTable
from eldr_serve.files import write_whole
from offline.cli import BadInput, run
from offline.plots import signature_space_figure

KEY = "demo"
console = Console()
_WIDTH = 120  # of the table, also where the output is not a terminal


@dataclass
class Block:
    """One stretch of load under one policy."""

    policy: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    placed: int = 0
    best: int = 0
    active_sum: float = 0.0
    batch_sum: float = 0.0
    steps: float = 0.0
    load: list[tuple[float, list[int]]] = field(default_factory=list)  # s, in flight by worker


@contextmanager
def _step(what: str) -> Iterator[None]:
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"[green]done[/] {what} ({time.perf_counter() - start:.0f} s)")


def _command(*arguments: str, log: Path) -> None:
    """Run a command of ours, its progress on the terminal; BadInput with its last line if it fails."""
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            stderr=file,
            env=os.environ | {"RAY_ADDRESS": "auto"},
            check=False,
        )
    if done.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise BadInput(f"{arguments[0]} failed: {last} (all of it in {log})")


class _Service:
    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"})

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get("/eldr/status").json()
        return answer

    def set_policy(self, name: str) -> None:
        self._http.put("/eldr/policy", json={"name": name}).raise_for_status()

    def wait_idle(self) -> None:
        while self.status()["leases"]:
            time.sleep(0.2)

    def decode_totals(self) -> dict[str, float]:
        """Sums over decode engines of what their steps reported, from Ray's metrics endpoint."""
        import ray

        replicas = [worker["replica"] for worker in self.status()["workers"]]
        text = httpx.get(f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics", timeout=60).text
        names = {
            "ray_eldr_active_experts_sum": "active",
            "ray_eldr_active_experts_count": "steps",
            "ray_eldr_decode_batch_size_sum": "batch",
        }
        totals = dict.fromkeys(names.values(), 0.0)
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if (name := names.get(head.partition("{")[0])) and any(
                f'"{replica}"' in head for replica in replicas
            ):
                totals[name] += float(value)
        return totals

    def settled_totals(self) -> dict[str, float]:
        """decode_totals once they stand still: engines report every few seconds."""
        totals, still = self.decode_totals(), 0
        while still < 6:
            time.sleep(1.0)
            newer = self.decode_totals()
            still = still + 1 if newer == totals else 0
            totals = newer
        return totals


@contextmanager
def _application(deployment: Path, model: Path, port: int) -> Iterator[_Service]:
    # Before ray is imported: a cluster of this demo alone, which needs no token and reports to nobody.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve

    from eldr_serve.serving.app import build_app

    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in ("prefill_config", "decode_config"):
        arguments[role]["model_loading_config"]["model_source"] = str(model)
    arguments["admin_key"] = KEY
    for noisy in ("ray", "ray.serve", "vllm"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    ray.init("local", num_cpus=8, log_to_driver=False, logging_level="error", object_store_memory=400_000_000)
    try:
        with _step("starting the engines (1 prefill, 2 decode)"):
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build_app(arguments), name="eldr", route_prefix="/")
            service = _Service(f"http://127.0.0.1:{port}")
            while not service.status()["ingress"]["ready"]:
                time.sleep(0.5)
        yield service
    finally:
        with _step("stopping everything"):
            serve.shutdown()
            ray.shutdown()


def _drive(
    service: _Service,
    block: Block,
    prompts: Path,
    rate: float,
    users: int,
    seconds: int,
    out: Path,
    seed: int,
) -> None:
    """Load for some seconds under the block's policy."""
    service.set_policy(block.policy)
    service.wait_idle()
    before, counters = service.settled_totals(), service.status()["counters"]
    record = out / f"requests_{block.policy}_{seed}.jsonl"
    stop = threading.Event()

    def watch() -> None:
        start = time.perf_counter()
        while not stop.wait(0.5):
            workers = service.status().get("workers", [])
            block.load.append((time.perf_counter() - start, [w["in_flight"] for w in workers]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "locust",
            "-f",
            "loadgen/locustfile.py",
            "--headless",
            "--host",
            service.url,
            "--prompts",
            str(prompts),
            "--rate",
            str(rate),
            "--users",
            str(users),
            "--spawn-rate",
            str(users),
            "--run-time",
            f"{seconds}s",
            "--stop-timeout",
            "60",
            "--max-tokens",
            "64",
            "--ignore-eos",
            "--record",
            str(record),
            "--seed",
            str(seed),
            "--only-summary",
        ],
        check=False,
        stdout=(out / "locust.log").open("a"),
        stderr=subprocess.STDOUT,
    )
    stop.set()
    watcher.join()
    service.wait_idle()
    after, now = service.settled_totals(), service.status()["counters"]
    block.requests = [json.loads(line) for line in record.read_text().splitlines()]
    block.placed = now["placed"] - counters.get("placed", 0)
    block.best = now["best_worker"] - counters.get("best_worker", 0)
    block.active_sum, block.steps, block.batch_sum = (
        after[k] - before[k] for k in ("active", "steps", "batch")
    )


def summarise(policy: str, blocks: list[Block]) -> dict[str, Any]:
    """One row of the table, over all blocks of a policy."""
    requests = [r for b in blocks for r in b.requests]
    good = [r for r in requests if "error" not in r]
    steps = sum(b.steps for b in blocks) or float("nan")
    placed = sum(b.placed for b in blocks)

    def percentile(key: str, q: float) -> float:
        values = [1000 * r[key] for r in good if r.get(key) is not None]
        return float(np.percentile(values, q)) if values else float("nan")

    return {
        "policy": policy,
        "requests": len(requests),
        "failures": len(requests) - len(good),
        "ttft_p50_ms": percentile("ttft_s", 50),
        "tpot_p50_ms": percentile("tpot_s", 50),
        "tpot_p99_ms": percentile("tpot_s", 99),
        "active_experts": sum(b.active_sum for b in blocks) / steps,
        "batch_size": sum(b.batch_sum for b in blocks) / steps,
        "best_worker_share": sum(b.best for b in blocks) / placed if placed else float("nan"),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(title="the same prompts under two policies")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=max(console.width, _WIDTH)).print(table)


def _report(out: Path, rows: list[dict[str, Any]], blocks: list[Block], trace: Path, table: Path) -> Path:
    """A self-contained HTML page: the table, the signature space, TPOT and load over time."""
    from matplotlib.figure import Figure

    space = signature_space_figure(CalibrationTrace.load(trace), RoutingTable.load(table))
    figure = Figure(figsize=(11, 4), layout="constrained")
    distribution, *loads = figure.subplots(1, 3)
    for row in rows:
        values = [
            1000 * r["tpot_s"]
            for b in blocks
            if b.policy == row["policy"]
            for r in b.requests
            if r.get("tpot_s")
        ]
        distribution.ecdf(values, label=row["policy"])
    distribution.set(xlabel="TPOT, ms", ylabel="share of requests")
    distribution.legend()
    for axes, row in zip(loads, rows, strict=False):
        block = next(b for b in blocks if b.policy == row["policy"])
        times = [t for t, _ in block.load]
        for worker in range(max((len(w) for _, w in block.load), default=0)):
            axes.plot(
                times, [w[worker] if worker < len(w) else 0 for _, w in block.load], label=f"worker {worker}"
            )
        axes.set(xlabel="time, s", ylabel="requests in flight", title=row["policy"])
        axes.legend()
    names = list(rows[0])
    cells = "".join(
        "<tr>"
        + "".join(
            f"<td>{row[n]:.2f}</td>" if isinstance(row[n], float) else f"<td>{row[n]}</td>" for n in names
        )
        + "</tr>"
        for row in rows
    )
    page = (
        "<!doctype html><meta charset='utf-8'><title>eldr-serve demo</title>"
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #ccc}img{max-width:100%}</style>"
        "<h1>eldr-serve demo</h1>"
        f"<p>{html.escape(json.dumps(environment()))}</p>"
        f"<table><tr>{''.join(f'<th>{n}</th>' for n in names)}</tr>{cells}</table>"
        "<p>Two engines share two cores here, so times are noisy; active experts are not.</p>"
        f"<h2>Signature space</h2><img alt='signatures by domain, with centroids' src='{_inline(space)}'>"
        f"<h2>Time per output token, and load</h2><img alt='TPOT and load' src='{_inline(figure)}'>"
    )
    path = out / "report.html"
    write_whole(path, page)
    return path


def _inline(figure: Any) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def demo(
    prompts: Annotated[Path, typer.Option(help="JSONL file or folder of prompts with domains.")] = Path(
        "demo_model/prompts"
    ),
    deployment: Annotated[Path, typer.Option(help="Deployment YAML.")] = Path("deployments/cpu_demo.yaml"),
    intermediate: Annotated[
        int, typer.Option(min=32, help="Neurons an expert, by widening with zeros; 32 is the model as it is.")
    ] = 512,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests/s, Poisson arrivals.")] = 3.0,
    users: Annotated[int, typer.Option(min=1, help="Requests in flight, at most.")] = 32,
    seconds: Annotated[int, typer.Option(min=5, help="Length of each stretch of load, s.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Stretches of each policy, in turn.")] = 2,
    calibration: Annotated[int, typer.Option(min=8, help="Prompts to calibrate on.")] = 160,
    port: Annotated[int, typer.Option(help="HTTP port.")] = 8000,
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo writes.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and clustering.")] = 0,
) -> None:
    """Serve the demo model and compare shortest-queue with locality-band on it."""
    out.mkdir(parents=True, exist_ok=True)
    model = Path("demo_model/weights").resolve()
    if not (model / "config.json").exists():
        raise BadInput("demo_model/weights is not there: run the demo from the repository's root")
    if intermediate > 32:
        with _step(f"widening the experts from 32 to {intermediate} neurons"):
            wide = (out / f"model_{intermediate}").resolve()
            if not (wide / "config.json").exists():
                _command(
                    "demo_model.widen",
                    "--intermediate",
                    str(intermediate),
                    "--out",
                    str(wide),
                    log=out / "widen.log",
                )
            model = wide
    trace, table = out / "trace.safetensors", out / "table.safetensors"
    policies = ("shortest-queue", "locality-band")
    blocks = [Block(policy) for _ in range(rounds) for policy in policies]
    with _application(deployment, model, port) as service:
        console.print("calibrating: which experts do the prompts use?")
        _command(
            "offline.calibrate",
            "--deployment",
            str(deployment),
            "--prompts",
            str(prompts),
            "--out",
            str(trace),
            "--limit",
            str(calibration),
            "--max-tokens",
            "32",
            "--seed",
            str(seed),
            log=out / "calibrate.log",
        )
        console.print("fitting one cluster a decode worker, and swapping the table in")
        _command("offline.refit", "--trace", str(trace), "--swap", "--out", str(table), log=out / "refit.log")
        for number, block in enumerate(blocks):
            with _step(f"load under {block.policy} ({number + 1} of {len(blocks)})"):
                _drive(service, block, prompts, rate, users, seconds, out, seed=1 + number // len(policies))
    rows = [summarise(policy, [b for b in blocks if b.policy == policy]) for policy in policies]
    _print(rows)
    report = _report(out, rows, blocks, trace, table)
    result = {
        "name": "demo",
        **environment(),
        "seed": seed,
        "inputs": {
            "prompts": prompts.name,
            "rate": rate,
            "users": users,
            "seconds": seconds,
            "rounds": rounds,
            "intermediate": intermediate,
        },
        "rows": rows,
        "notes": "open loop, Poisson arrivals; all engines share this machine's cores",
    }
    write_whole(out / "demo.json", json.dumps(result, indent=1) + "\n")
    console.print(f"report: {report}; figures: {out / 'demo.json'}")
    if any(row["failures"] for row in rows):
        raise BadInput(f"{sum(row['failures'] for row in rows)} requests failed; see {out}/requests_*.jsonl")


if __name__ == "__main__":
    run(demo)
