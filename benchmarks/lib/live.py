"""Live comparisons of policies: the application, its tables, and the load of loadgen.compare.

Shared machines are faster in one trial than in the next. So each policy has two rows. The row with `clock`
wall has wall-clock times. The row with `clock` normalised has times normalised for CPU speed
(benchmarks/lib/normalised_time.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.cluster import local_ray, wait_ready
from benchmarks.lib.cpu_speed import record_cpu_speed
from benchmarks.lib.engines import engine_roles, our_arguments
from benchmarks.lib.normalised_time import NORMALISED, NormalisedTime, fit_engine_sensitivity, normalise_trial
from benchmarks.lib.prompts import no_longer_than
from eldr_serve.commands.client import OperatorClient
from eldr_serve.config.ray_settings import QUIET
from eldr_serve.errors import UserInputError
from eldr_serve.experts.routing_table import RoutingTable
from loadgen.figures import BASELINES, policy_rows
from loadgen.journal import Journal
from loadgen.statistics import LatencyObjective
from loadgen.trial import read_trials
from loadgen.workload import WorkloadPrompt, read_prompts

KEY = "live"
_KV_BYTES = 2**28  # KV cache of each engine; wide experts take the rest of the memory


def length_options(mean: int) -> dict[str, int]:
    """Return the options of loadgen.compare for answers of this mean length, in tokens.

    Lengths vary, since with equal ones a closed loop would start requests in waves.
    """
    return {"min-tokens": mean // 2, "max-tokens": mean + mean // 2}


def decode_replicas_of(arguments: dict[str, Any]) -> int:
    """Return the number of decode workers in a deployment's `args`."""
    return int(arguments["decode_config"]["deployment_config"]["num_replicas"])


def wide_arguments(
    deployment: Path, model: Path, stream_interval: int, decode_replicas: int | None = None
) -> dict[str, Any]:
    """Return a deployment's `args` for a widened model, whose engines spend their time on experts."""
    arguments = our_arguments(deployment, model, decode_replicas)
    for role in engine_roles(arguments):
        arguments[role]["runtime_env"]["env_vars"].pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments[role]["engine_kwargs"] |= {
            "kv_cache_memory_bytes": _KV_BYTES,
            "stream_interval": stream_interval,
        }
    return arguments


def select_prompts(prompts: Path, ids: Iterable[str], max_tokens: int) -> list[WorkloadPrompt]:
    """Return the prompts with these ids, except those that are too long."""
    wanted_ids = set(ids)
    return no_longer_than((p for p in read_prompts([prompts]) if p.id in wanted_ids), max_tokens, chat=True)


@contextmanager
def serve_application(arguments: dict[str, Any], *, port: int) -> Iterator[OperatorClient]:
    """Run the application with these `args`, ready at `port`. Serve's proxy listens on the next port."""
    with local_ray(http_port=port + 1, environment=QUIET):
        yield start_application(arguments, port=port)


def start_application(
    arguments: dict[str, Any], *, port: int, name: str = "eldr", max_in_flight: int | None = None
) -> OperatorClient:
    """Start an application in the running cluster; return its client when it is ready.

    Args:
        name: name of the application, unique in the cluster.
        max_in_flight: maximum number of requests that the ingress admits at once; None: its default.
    """
    from ray import serve

    from eldr_serve.app import build_app

    ingress = {"port": port} | ({} if max_in_flight is None else {"max_in_flight": max_in_flight})
    application = build_app(arguments | {"name": name, "ingress": ingress, "admin_key": KEY})
    serve.run(application, name=name, route_prefix="/" if name == "eldr" else f"/{name}")
    wait_ready(f"http://127.0.0.1:{port}", 300)
    return OperatorClient(f"http://127.0.0.1:{port}", KEY)


def stop_application(name: str) -> None:
    """Stop an application of the running cluster."""
    from ray import serve

    serve.delete(name)


def serve_shortest_queue_without_pool(
    arguments: dict[str, Any], *, port: int
) -> AbstractContextManager[OperatorClient]:
    """Run the application as `serve_application` does, with shortest-queue and without a signature pool."""
    return serve_application(
        arguments | {"signatures": {"actors": 0}, "router": {"policy": "shortest-queue"}}, port=port
    )


class LiveComparison:
    """A comparison that is kept in a folder until `finish`.

    Raises:
        UserInputError: the folder has a comparison with other inputs.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any]) -> None:
        self.folder = folder
        self._journal = Journal(folder / "asked.jsonl", inputs)

    @property
    def result(self) -> dict[str, Any] | None:
        """Return the report of loadgen.compare, or None until it has finished."""
        result: dict[str, Any] | None = self._journal.get("result")
        return result

    def measure(self, table: RoutingTable, load: dict[str, Any], *, port: int) -> None:
        """Swap the table into the application at `port`, and run loadgen.compare, or resume it."""
        if self._journal.get("begun") is None and (self.folder / "comparison" / "compare.json").exists():
            self._move_report()  # `finish` of the previous comparison was interrupted
        self._journal.put("begun", True)
        url = f"http://127.0.0.1:{port}"
        out = self.folder / "comparison"
        table.save(self.folder / "table.safetensors")
        OperatorClient(url, KEY).swap_table(table.to_bytes())
        options = load | {"host": url, "out": out}
        with record_cpu_speed(self.folder / "cpu_speed"):
            done = subprocess.run(
                [sys.executable, "-m", "loadgen.compare", *(f"--{k}={v}" for k, v in options.items())],
                env=os.environ | {"ELDR_ADMIN_KEY": KEY},
                check=False,
            )
        if done.returncode:
            raise UserInputError(f"the comparison ended with status {done.returncode}; see {out}")
        self._journal.put("result", json.loads((out / "compare.json").read_text()))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of all policies in wall-clock time, then those in normalised time."""
        assert self.result is not None
        inputs, trials = self.result["inputs"], read_trials(self.folder / "comparison")
        clock = NormalisedTime.read(self.folder / "cpu_speed")
        sensitivity = fit_engine_sensitivity(trials, clock, BASELINES)
        engine_clock = clock.change_sensitivity(sensitivity)
        rows = policy_rows(
            inputs["policies"],
            [normalise_trial(trial, engine_clock) for trial in trials],
            objective=LatencyObjective(inputs["slo_ttft_ms"], inputs["slo_tpot_ms"]),
            **{name: inputs[name] for name in ("warm_up_s", "seconds", "seed")},
        )
        return [{"clock": "wall", **row} for row in self.result["rows"]] + [
            {"clock": NORMALISED, **row, "cpu_speed_sensitivity": sensitivity} for row in rows
        ]

    def finish(self) -> None:
        """Mark the figures as published: the next run starts a new comparison. The report stays."""
        self._journal.remove()  # first, since `rows` reads what is moved
        self._move_report()

    def _move_report(self) -> None:
        for name in ("cpu_speed", "published"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "comparison").rename(self.folder / "published")
