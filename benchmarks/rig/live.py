"""Policies compared live: the application serves, tables are swapped in, loadgen.compare drives the load.

Shared machines are faster in one block than in the next. So there are two rows of each policy: `clock`
wall, and even, where time is told by the work that the cores could do in it (benchmarks/rig/even_clock.py).
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
from typing import Annotated, Any

import typer

from benchmarks.rig.cluster import local_ray, wait_ready
from benchmarks.rig.engines import WEIGHTS, our_arguments
from benchmarks.rig.even_clock import EvenClock, evened, felt_by_engines
from benchmarks.rig.pace import probed
from eldr_serve.artifacts import RoutingTable
from eldr_serve.client import Client
from eldr_serve.files import write_whole
from loadgen.figures import BASELINES, rows_of
from loadgen.plan import read_blocks
from loadgen.stats import Slo
from loadgen.workload import Prompt, read_prompts
from offline.calibrate import prompt_tokens
from offline.cli import BadInput

_KEY = "live"
_KV_BYTES = 2**28  # an engine; wide experts take the rest of the memory
InFlightOption = Annotated[int, typer.Option(min=1, help="Requests in flight, closed loop.")]
DeploymentOption = Annotated[Path, typer.Option(help="Deployment YAML.")]
IntervalOption = Annotated[int, typer.Option(min=1, help="Tokens a chunk of an answer.")]
BurnInOption = Annotated[
    int, typer.Option(min=0, help="Load on engines that have just started, in no figure, s.")
]
LongestOption = Annotated[int, typer.Option(min=1, help="Longer prompts are left out, tokens.")]


def lengths(mean: int) -> dict[str, int]:
    """Options of loadgen.compare. Answers of one length keep a closed loop in waves: all start, all end."""
    return {"min-tokens": mean // 2, "max-tokens": mean + mean // 2}


def workers_of(arguments: dict[str, Any]) -> int:
    """Decode workers of a deployment's `args`."""
    return int(arguments["decode_config"]["deployment_config"]["num_replicas"])


def wide_arguments(deployment: Path, model: Path, stream_interval: int) -> dict[str, Any]:
    """`args` of a deployment for a widened model, whose engines spend their time on experts."""
    arguments = our_arguments(deployment, model)
    for role in ("prefill_config", "decode_config"):
        arguments[role]["runtime_env"]["env_vars"].pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments[role]["engine_kwargs"] |= {
            "kv_cache_memory_bytes": _KV_BYTES,
            "stream_interval": stream_interval,
        }
    return arguments


def fitting(prompts: Path, ids: Iterable[str], most_tokens: int) -> list[Prompt]:
    """Those of the ids, without the longer ones."""
    from transformers import AutoTokenizer

    wanted, tokenizer = set(ids), AutoTokenizer.from_pretrained(WEIGHTS)
    return [
        p
        for p in read_prompts([prompts])
        if p.id in wanted and len(prompt_tokens(tokenizer, p.text, chat=True)) <= most_tokens
    ]


@contextmanager
def serving(arguments: dict[str, Any], *, port: int) -> Iterator[None]:
    """The application with these `args`, ready."""
    arguments |= {"router": {"policy": "shortest-queue"}, "admin_key": _KEY}
    with local_ray(http_port=port):
        from ray import serve

        from eldr_serve.serving.app import build_app

        serve.run(build_app(arguments), name="eldr", route_prefix="/")
        wait_ready(f"http://127.0.0.1:{port}", 300)
        yield


def compared(table: RoutingTable, options: dict[str, Any], *, port: int, folder: Path) -> dict[str, Any]:
    """Swap the table into what serves there; what loadgen.compare then says. One in the folder goes on."""
    url = f"http://127.0.0.1:{port}"
    comparison = folder / "comparison"
    table.save(folder / "table.safetensors")
    Client(url, _KEY).swap_table(table.to_bytes())
    options |= {"host": url, "out": comparison}
    with probed(folder / "pace"):
        done = subprocess.run(
            [sys.executable, "-m", "loadgen.compare", *(f"--{k}={v}" for k, v in options.items())],
            env=os.environ | {"ELDR_ADMIN_KEY": _KEY},
            check=False,
        )
    if done.returncode:
        (comparison / "compare.json").unlink(missing_ok=True)
        raise BadInput(f"the comparison ended with status {done.returncode}; see {comparison}")
    result = result_of(folder)
    assert result is not None
    return result


def claimed(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """`result_of`, if a run for what is asked has ended. Until `finish` the folder is for nothing else.

    Raises:
        BadInput: it holds one of something else.
    """
    file, wanted = folder / "asked.json", json.loads(json.dumps(asked, default=str))
    if file.exists() and (folder / "comparison").exists():
        found = json.loads(file.read_text())
        if other := [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]:
            raise BadInput(
                f"{folder} holds a comparison with another {', '.join(other)}: give the same or remove it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(wanted, indent=1) + "\n")
    return result_of(folder)


def result_of(folder: Path) -> dict[str, Any] | None:
    """What the comparison in the folder said, until `finish`; None if it has not ended."""
    file = folder / "comparison" / "compare.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def by_both_clocks(result: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Rows of the folder's `result_of` by the wall's clock, and by one that goes as fast as the cores."""
    asked, blocks = result["inputs"], read_blocks(folder / "comparison")
    pace = EvenClock.read(folder / "pace")
    felt = felt_by_engines(blocks, pace, BASELINES)
    clock = pace.as_felt(felt)
    even = rows_of(
        asked["policies"],
        [evened(block, clock) for block in blocks],
        warm_up_s=asked["warm_up_s"],
        seconds=asked["seconds"],
        slo=Slo(asked["slo_ttft_ms"], asked["slo_tpot_ms"]),
        seed=asked["seed"],
    )
    return [{"clock": "wall", **row} for row in result["rows"]] + [
        {"clock": "even", **row, "pace_felt": felt} for row in even
    ]


def finish(folder: Path) -> None:
    """The comparison's figures are published: the next run is another. Its report stays."""
    shutil.rmtree(folder / "pace", ignore_errors=True)
    shutil.rmtree(folder / "published", ignore_errors=True)
    (folder / "asked.json").unlink(missing_ok=True)
    (folder / "comparison").rename(folder / "published")
