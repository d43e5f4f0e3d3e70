"""Compare the counts of engines under pressure with the choices of Hugging Face's model, integer by integer.

    python -m benchmarks.engine.exact_counts --device cuda

Both of vLLM's model runners serve the batches of `exact_engine`, on a GPU in CUDA graphs. Their prompts share
prefixes and fit few KV blocks, so that prefill is chunked, prefixes are found in the cache and requests are
preempted. Columns that end in `_differ` must be 0, and each kind must have cells, otherwise the exit status
is 1. Rows `against` reference compare with Hugging Face's model on the CPU, in float32 without a cache. Rows
`against` V1 compare the runners with each other, including tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from benchmarks.lib import options, tiny_model
from benchmarks.lib.cluster import ROOT, python_path
from benchmarks.lib.engines import TRITON_CPU
from benchmarks.lib.exact import ComparedCells, compare_with_reference, compare_with_report, reference
from eldr_serve.commands.run import run
from loadgen.results import publish

BENCHMARKS = {"exact_counts": "default"}
_ENV = {
    "cuda": {
        "TRITON_F32_DEFAULT": "ieee",  # the rounding of TF32 would change choices
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    },
    "cpu": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"},
}
_PORTS = {"V1": 28211, "V2": 28221}  # ports of NIXL's side channels


class EngineSettings(NamedTuple):
    """The settings of the engines of both runners; see the options of `exact_counts`."""

    device: str
    batches: str
    graphs: str


def exact_counts(
    device: options.CpuOrCuda = "cpu",
    batches: Annotated[
        Literal["all", "short"], typer.Option(help="All five batches, or the first two, of 10 requests.")
    ] = "all",
    graphs: Annotated[
        Literal["FULL", "FULL_DECODE_ONLY", "NONE"], typer.Option(help="CUDA graphs of vLLM on a GPU.")
    ] = "FULL",
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Serve the batches under model runners V1 and V2, and compare every integer.

    Exit with status 1 if any integer differs, or if a batch has none of a kind.
    """
    settings = EngineSettings(device, batches, graphs)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model.make(model, seed)

        def serve(runner: str) -> dict[str, Any]:
            return _serve(runner, model, Path(folder) / f"{runner}.json", settings)

        with ThreadPoolExecutor() as pool:
            reports = dict(zip(_PORTS, pool.map(serve, _PORTS), strict=True))
        choices = reference(model)
        comparisons = {
            (runner, "reference"): compare_with_reference(report, choices)
            for runner, report in reports.items()
        }
    comparisons["V2", "V1"] = compare_with_report(reports["V2"], reports["V1"])
    rows = [
        _row(runner, against, number, cells, reports[runner])
        for (runner, against), batch_cells in comparisons.items()
        for number, cells in enumerate(batch_cells)
    ]
    fields = ("runner", "graphs", "cached_tokens", "preemptions", "decode_steps")
    publish(
        "exact_counts",
        rows,
        seed=seed,
        out=out,
        inputs={"device": device, "graphs": graphs}
        | {runner: {name: report[name] for name in fields} for runner, report in reports.items()},
        notes="tiny random Qwen3-MoE in float32; inputs say how many steps ran in which kind of CUDA graph",
    )
    wrong = sorted({column for row in rows for column in row if column.endswith("_differ") and row[column]})
    if wrong:
        typer.echo(f"{', '.join(wrong)} must be 0 in every row: see `exact_counts` in docs/gpu.md", err=True)
    compared = [cells.compared for batch_cells in comparisons.values() for cells in batch_cells]
    empty = sorted({kind for cells in compared for kind, number in cells.items() if not number})
    if empty:
        typer.echo(f"a batch has no {', '.join(empty)} cells, so nothing was compared", err=True)
    if wrong or empty:
        raise typer.Exit(1)


def _serve(runner: str, model: Path, out: Path, settings: EngineSettings) -> dict[str, Any]:
    """Run an engine in its own process and return its report."""
    folders = [TRITON_CPU] if (settings.device, runner) == ("cpu", "V2") else []
    environment = _ENV[settings.device] | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(*folders),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_PORTS[runner]),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if settings.device == "cuda":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
    elif runner == "V2":
        environment["TRITON_INTERPRET"] = "1"  # V2 requires it on vLLM's CPU engine
    command: list[str | Path] = [sys.executable, "-m", "benchmarks.lib.exact_engine", model, out, *settings]
    subprocess.run(command, env=os.environ | environment, check=True, cwd=ROOT)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def _row(
    runner: str, against: str, number: int, cells: ComparedCells, report: dict[str, Any]
) -> dict[str, Any]:
    records = [record for record in report["records"] if record["request"].startswith(f"{number}-")]
    row: dict[str, Any] = {"runner": runner, "against": against, "batch": number, "requests": len(records)}
    row["prompt_tokens"] = sum(len(record["prompt"]) for record in records)
    return row | {"token_cells": 0, "token_differ": 0} | cells.row()


if __name__ == "__main__":
    run(exact_counts)
