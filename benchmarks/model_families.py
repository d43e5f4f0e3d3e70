"""Which MoE families start with vLLM's defaults and are counted exactly, under both of its model runners.

    python -m benchmarks.model_families

Checkpoints are tiny and random, made by transformers on the spot. An engine of each serves prompts with
shared prefixes twice over few KV blocks. Read prompts_exact and decodes_exact against requests: what the
connector counted against what the engine's routers were seen to choose, token by token. differ_from_hf
are the choices, of all that entered the experts of Hugging Face's model for the same tokens, that were
others: rounding near ties, if anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import options
from benchmarks.harness.cluster import ROOT
from benchmarks.harness.engines import ENGINE_ENV
from benchmarks.harness.families import FAMILIES, choices
from benchmarks.harness.family_engine import CHUNK
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.signature import unpack_counts
from tools.cli import run
from tools.results import publish

_TRITON_CPU = ROOT / "tests/engine/triton_cpu"
RUNNERS = ("V1", "V2")


def serve(checkpoints: dict[str, Path], runner: str, work: Path) -> dict[str, dict[str, Any]]:
    """Family -> report of its engine (see family_engine), or {"error": the reason} where none started."""
    folders = [ROOT, *([_TRITON_CPU] if runner == "V2" else [])]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "VLLM_CPU_KVCACHE_SPACE": "1"}
    if runner == "V2":  # its kernels are Triton's, which runs them without a GPU in Python
        environment["TRITON_INTERPRET"] = "1"
    reports = {name: work / f"{name}.{runner}.json" for name in checkpoints}
    jobs = [f"{folder}={reports[name]}" for name, folder in checkpoints.items()]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.harness.family_engine", *jobs],
        env=os.environ | ENGINE_ENV | environment, check=True, cwd=ROOT,
    )  # fmt: skip
    return {name: json.loads(report.read_text()) for name, report in reports.items()}


def row(family: str, runner: str, checkpoint: Path, report: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    found = {"family": family, "runner": runner, "starts": "error" not in report}
    if "error" in report:
        return found | {"note": report["error"]}
    records = report["records"]
    seen = [np.array(record["seen"]) for record in records]  # [T,L,k]
    captured = [record for record in records if "eldr_prefill" in record]
    reference = choices(checkpoint)
    theirs = [np.sort(reference(r["prompt"] + r["output"][:-1]), axis=-1) for r in records]
    return found | {
        "kv_groups": "; ".join(f"{kind} {size}" for kind, size in report["groups"]),
        "requests": len(records),
        "captured": len(captured),
        "prompts_exact": sum(_prompt_exact(r, s) for r, s in zip(records, seen, strict=True)),
        "decodes_exact": sum(_decode_exact(r, s) for r, s in zip(records, seen, strict=True)),
        "in_several_steps": sum(len(r["prompt"]) - r["cached"] > CHUNK for r in records),
        "with_prefix_hit": sum(r["cached"] > 0 for r in records),
        "preemptions": int(report["preemptions"]),
        "choices": sum(s.size for s in seen),
        "differ_from_hf": sum(int(_others(s, t)) for s, t in zip(seen, theirs, strict=True)),
        "changed_by_recomputing": report["changed"],
    }


def _prompt_exact(record: dict[str, Any], seen: NDArray[np.int64]) -> bool:
    counts = unpack_counts(record["eldr_prefill"])
    return np.array_equal(counts, _histogram(seen[: len(record["prompt"])], counts.shape[1]))


def _decode_exact(record: dict[str, Any], seen: NDArray[np.int64]) -> bool:
    counts, decoded = unpack_counts(record["eldr_decode"]), seen[len(record["prompt"]) :]
    routes = np.sort(unpack_routes(record["eldr_routes"]), axis=-1)
    return np.array_equal(routes, decoded) and np.array_equal(counts, _histogram(decoded, counts.shape[1]))


def _histogram(chosen: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """[L,E] from [T,L,k]."""
    return np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in chosen.swapaxes(0, 1)])


def _others(mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> int:
    """Choices of [T,L,k] that are not among the other's of the same token and layer."""
    return int((mine[..., None] != theirs[..., None, :]).all(-1).sum())


def rows(families: Iterable[str], runners: Iterable[str], work: Path) -> list[dict[str, Any]]:
    """Lines of these families under these runners."""
    checkpoints = {name: FAMILIES[name].make(work / name) for name in families}
    reports = {runner: serve(checkpoints, runner, work) for runner in runners}
    return [
        row(name, runner, folder, reports[runner][name])
        for name, folder in checkpoints.items()
        for runner in reports
    ]


def model_families(seed: options.Seed = 0, out: options.Out = None) -> None:
    """Serve every family under both runners, and compare."""
    with tempfile.TemporaryDirectory() as work:
        found = rows(FAMILIES, RUNNERS, Path(work))
    publish(
        "model_families", found, inputs={"chunk_tokens": CHUNK}, seed=seed, out=out,
        notes="tiny random checkpoints in float32; V2 on a CPU, its kernels under Triton's interpreter",
    )  # fmt: skip


if __name__ == "__main__":
    run(model_families)
