"""Policies compared live: the application serves, tables are swapped in, loadgen.compare drives the load.

Shared machines are faster in one trial than in the next. So there are two rows of each policy: `clock` wall,
and even, whose times are normalised for CPU speed (benchmarks/lib/normalised_time.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.cluster import local_ray, wait_ready
from benchmarks.lib.cpu_speed import probed
from benchmarks.lib.engines import engine_roles, our_arguments
from benchmarks.lib.normalised_time import NormalisedTime, felt_by_engines, normalised
from benchmarks.lib.prompts import no_longer_than
from eldr_serve.client import Client
from eldr_serve.command_errors import BadInput
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.ray_settings import QUIET
from loadgen.figures import BASELINES, policy_rows
from loadgen.journal import Journal
from loadgen.statistics import Slo
from loadgen.trial import read_trials
from loadgen.workload import Prompt, read_prompts

KEY = "live"
_KV_BYTES = 2**28  # an engine; wide experts take the rest of the memory


def lengths(mean: int) -> dict[str, int]:
    """Options of loadgen.compare. Answers of one length keep a closed loop in waves: all start, all end."""
    return {"min-tokens": mean // 2, "max-tokens": mean + mean // 2}


def workers_of(arguments: dict[str, Any]) -> int:
    """Decode workers of a deployment's `args`."""
    return int(arguments["decode_config"]["deployment_config"]["num_replicas"])


def wide_arguments(
    deployment: Path, model: Path, stream_interval: int, decode_replicas: int | None = None
) -> dict[str, Any]:
    """`args` of a deployment for a widened model, whose engines spend their time on experts."""
    arguments = our_arguments(deployment, model, decode_replicas)
    for role in engine_roles(arguments):
        arguments[role]["runtime_env"]["env_vars"].pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments[role]["engine_kwargs"] |= {
            "kv_cache_memory_bytes": _KV_BYTES,
            "stream_interval": stream_interval,
        }
    return arguments


def fitting(prompts: Path, ids: Iterable[str], most_tokens: int) -> list[Prompt]:
    """Those of the ids, without the longer ones."""
    wanted = set(ids)
    return no_longer_than((p for p in read_prompts([prompts]) if p.id in wanted), most_tokens, chat=True)


@contextmanager
def serving(arguments: dict[str, Any], *, port: int) -> Iterator[None]:
    """The application with these `args`, ready at `port`; Serve's proxy is at the next one."""
    arguments |= {"router": {"policy": "shortest-queue"}, "admin_key": KEY, "ingress": {"port": port}}
    arguments.setdefault("signatures", {"actors": 0})  # benchmarks swap their own tables in
    with local_ray(http_port=port + 1, environment=QUIET):
        from ray import serve

        from eldr_serve.app import build_app

        serve.run(build_app(arguments), name="eldr", route_prefix="/")
        wait_ready(f"http://127.0.0.1:{port}", 300)
        yield


class Comparison:
    """A comparison in a folder, which until `finish` is for nothing but what was asked first.

    Args:
        asked: everything that its figures depend on.

    Raises:
        BadInput: the folder holds a comparison of something else.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        self.folder = folder
        self._journal = Journal(folder / "asked.jsonl", asked)

    @property
    def result(self) -> dict[str, Any] | None:
        """What loadgen.compare said; None if it has not ended."""
        result: dict[str, Any] | None = self._journal.get("result")
        return result

    def measure(self, table: RoutingTable, load: dict[str, Any], *, port: int) -> None:
        """Swap the table into what serves there, and run loadgen.compare; one that was stopped goes on."""
        self._journal.put("begun", True)
        url = f"http://127.0.0.1:{port}"
        out = self.folder / "comparison"
        table.save(self.folder / "table.safetensors")
        Client(url, KEY).swap_table(table.to_bytes())
        options = load | {"host": url, "out": out}
        with probed(self.folder / "cpu_speed"):
            done = subprocess.run(
                [sys.executable, "-m", "loadgen.compare", *(f"--{k}={v}" for k, v in options.items())],
                env=os.environ | {"ELDR_ADMIN_KEY": KEY},
                check=False,
            )
        if done.returncode:
            raise BadInput(f"the comparison ended with status {done.returncode}; see {out}")
        self._journal.put("result", json.loads((out / "compare.json").read_text()))

    def rows(self) -> list[dict[str, Any]]:
        """Its rows, of time as it was (`clock` wall) and normalised for CPU speed (`clock` even)."""
        assert self.result is not None
        asked, trials = self.result["inputs"], read_trials(self.folder / "comparison")
        notes = NormalisedTime.read(self.folder / "cpu_speed")
        felt = felt_by_engines(trials, notes, BASELINES)
        clock = notes.as_felt(felt)
        rows = policy_rows(
            asked["policies"],
            [normalised(trial, clock) for trial in trials],
            warm_up_s=asked["warm_up_s"],
            seconds=asked["seconds"],
            slo=Slo(asked["slo_ttft_ms"], asked["slo_tpot_ms"]),
            seed=asked["seed"],
        )
        return [{"clock": "wall", **row} for row in self.result["rows"]] + [
            {"clock": "even", **row, "pace_felt": felt} for row in rows
        ]

    def finish(self) -> None:
        """Its figures are published: the next run is another. Its report stays."""
        for name in ("cpu_speed", "published"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "comparison").rename(self.folder / "published")
        self._journal.remove()
