"""Check which MoE families start with vLLM's defaults and are counted exactly, under both model runners.

    python -m benchmarks.engine.model_families

transformers makes tiny random checkpoints on the spot. An engine of each serves prompts with shared prefixes
twice over few KV blocks. Compare prompts_exact and decodes_exact with requests: the connector's counts
against the choices observed at the engine's routers, token by token. differ_from_hf: choices that differ from
the experts that Hugging Face's model uses for the same tokens. tokens_near_ties counts tokens observed with
several choices, since batches round differently. differ_replayed counts the differences that remain when
Hugging Face's model is forced to the engine's experts, so that no difference causes others; widest_gap is the
largest distance of these from a tie, as a share of the range of the router's scores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.cluster import ROOT, python_path
from benchmarks.lib.engines import ENGINE_ENV
from benchmarks.lib.exact import histogram
from benchmarks.lib.families import FAMILIES, Reference
from benchmarks.lib.family_engine import CHUNK
from eldr_serve.commands.errors import UserInputError, run
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.experts.signature import unpack_counts
from loadgen.results import RESULTS, publish, read_rows

_TRITON_CPU = ROOT / "tests/engine/triton_cpu"
_TORCHVISION = ROOT / "tests/engine/torchvision_cpu"
RUNNERS = ("V1", "V2")


def serve(checkpoints: dict[str, Path], runner: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return each family's report (see family_engine), or {"error": the reason} where no engine started."""
    reports: dict[str, dict[str, Any]] = {}
    for torchvision in (False, True):
        names = [name for name in checkpoints if FAMILIES[name].torchvision == torchvision]
        if not names:
            continue
        folders = [*([_TORCHVISION] if torchvision else []), *([_TRITON_CPU] if runner == "V2" else [])]
        environment = {"PYTHONPATH": python_path(*folders)}
        if runner == "V2":  # it uses Triton kernels, which run in Python without a GPU
            environment["TRITON_INTERPRET"] = "1"
        folder = work / f"{runner}{'_torchvision' * torchvision}"
        folder.mkdir()
        jobs = {
            name: {
                "arguments": FAMILIES[name].engine | {"model": str(checkpoints[name])},
                "mla_for_amx": FAMILIES[name].mla_for_amx,
            }
            for name in names
        }
        (folder / "jobs.json").write_text(json.dumps(jobs))
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.family_engine", str(folder / "jobs.json")],
            env=os.environ | ENGINE_ENV | environment,
            check=False,
            cwd=ROOT,
        ).returncode
        reports |= {name: report(folder / f"{name}.json", ended) for name in names}
    return reports


def report(path: Path, ended: int) -> dict[str, Any]:
    """Read an engine's report; without one, report the exit status, so that other families still count."""
    if not path.exists():
        return {"error": f"the engines' process ended with status {ended} before this one"}
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def row(family: str, runner: str, checkpoint: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return the table row of a family under a runner."""
    start = {"family": family, "runner": runner, "starts": "error" not in report}
    if "error" in report:
        return start | {"note": shorten(report["error"], 240)}
    records = report["records"]
    captured = [record for record in records if "eldr_prefill" in record]
    reference = Reference(checkpoint)
    given = {} if FAMILIES[family].exact else _replayed(records, reference)
    return (
        start
        | {
            "kv_groups": "; ".join(f"{kind} {size}" for kind, size in report["groups"]),
            "requests": len(records),
            "captured": len(captured),
            "prompts_exact": sum(map(_prompt_exact, captured)),
            "decodes_exact": sum(map(_decode_exact, captured)),
            "in_several_steps": sum(len(r["prompt"]) - r["cached"] > report["step_tokens"] for r in records),
            "with_prefix_hit": sum(r["cached"] > 0 for r in records),
            "preemptions": int(report["preemptions"]),
            "choices": sum(np.size([known[0] for known in r["seen"]]) for r in records),
            "differ_from_hf": int(sum(_others(_first(r), reference.route(_fed(r))).sum() for r in records)),
            "tokens_near_ties": sum(len(known) > 1 for r in records for known in r["seen"]),
        }
        | given
    )


def _prompt_exact(record: dict[str, Any]) -> bool:
    """Return whether the counts follow from one of the observed choices of each token."""
    counts = unpack_counts(record["eldr_prefill"]).astype(np.int64)
    choices = record["seen"][: len(record["prompt"])]
    shape, several = counts.shape, [known for known in choices if len(known) > 1]
    rest = counts - sum(
        (histogram(np.array(known), shape) for known in choices if len(known) == 1), 0 * counts
    )
    open_ = [np.stack([histogram(np.array([choice]), shape) for choice in known]) for known in several]
    most = [sum((token.max(0) for token in open_[n:]), np.zeros_like(rest)) for n in range(len(open_) + 1)]

    def explained(number: int, rest: NDArray[np.int64]) -> bool:
        if (rest < 0).any() or (rest > most[number]).any():
            return False
        return number == len(open_) or any(explained(number + 1, rest - choice) for choice in open_[number])

    return explained(0, rest)


def _decode_exact(record: dict[str, Any]) -> bool:
    counts = unpack_counts(record["eldr_decode"])
    routes = np.sort(unpack_routes(record["eldr_routes"]), axis=-1)
    choices = record["seen"][len(record["prompt"]) :]
    if not np.array_equal(counts, histogram(routes, counts.shape)):
        return False
    return all(route in known for route, known in zip(routes.tolist(), choices, strict=True))


def _fed(record: dict[str, Any]) -> list[int]:
    tokens: list[int] = record["prompt"] + record["output"][:-1]
    return tokens


def _first(record: dict[str, Any]) -> NDArray[np.int64]:
    """Return [T,L,k]: the first observed choice of each token."""
    return np.array([known[0] for known in record["seen"]])


def _others(mine: NDArray[np.int64], theirs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool[T,L,k]: choices that are not among `theirs`, [T,L,k], of the same token and layer."""
    return np.asarray((mine[..., None] != theirs[..., None, :]).all(-1))


def _replayed(records: list[dict[str, Any]], reference: Reference) -> dict[str, Any]:
    """Compare with Hugging Face's model while the engine's experts are forced on it.

    A different choice causes others in later layers and tokens; forced, each difference stands alone.
    """
    differ, widest = 0, 0.0
    for record in records:
        mine = _first(record)
        theirs = reference.route(_fed(record), mine)
        others = _others(mine, theirs)
        differ += int(others.sum())
        for at in map(tuple, np.argwhere(others.any(-1))):
            widest = max(widest, gap(mine[at], theirs[at], reference.scores[at], reference.groups))
    return {"differ_replayed": differ, "widest_gap": round(widest, 4)}


def gap(
    mine: NDArray[np.int64],
    theirs: NDArray[np.int64],
    score: NDArray[np.float32],
    groups: tuple[int, int] = (1, 1),
) -> float:
    """Return how far two choices [k] of a token are from a tie: what `theirs` score more where they differ.

    The result is a share of the range of the experts' `score` [E] or, if `mine` has another group, of the
    groups' scores. `groups`: (number of groups, number that the router chooses first by the sum of their two
    best scores).
    """
    many, taken = groups
    if many > 1:
        of_groups = np.sort(score.reshape(many, -1))[:, -2:].sum(1)
        first = np.argsort(of_groups)[-taken:]
        others = of_groups[np.setdiff1d(mine * many // len(score), first)]
        if len(others):
            return float((of_groups[first].min() - others.min()) / np.ptp(of_groups))
    ours, other = np.setdiff1d(mine, theirs), np.setdiff1d(theirs, mine)
    return float((score[other].max() - score[ours].min()) / np.ptp(score)) if len(ours) else 0.0


def rows(families: Iterable[str], runners: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """Return the rows of these families under these runners."""
    checkpoints = {name: FAMILIES[name].make(work / name) for name in families}
    with ThreadPoolExecutor() as together:
        served = [together.submit(serve, checkpoints, runner, work) for runner in runners]
    reports = {runner: served_by.result() for runner, served_by in zip(runners, served, strict=True)}
    return [
        row(name, runner, folder, reports[runner][name])
        for name, folder in checkpoints.items()
        for runner in reports
    ]


def model_families(
    anew: Annotated[
        str, typer.Option(help="Families to measure, with commas; other rows stay as published; default all.")
    ] = "",
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Serve every family under both runners, and compare the counts."""
    names = anew.split(",") if anew else list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise UserInputError(f"there is no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory() as work:
        measured = rows(names, RUNNERS, Path(work))
    inputs: dict[str, Any] = {"chunk_tokens": CHUNK}
    notes = ""
    if anew:
        measured = with_published(measured)
        before = json.loads((RESULTS / "model_families.json").read_text())["commit"]
        inputs["anew"] = names
        notes = f"; rows of families that are not among inputs.anew are of commit {before} or before"
    publish(
        "model_families",
        measured,
        inputs=inputs,
        seed=seed,
        out=out,
        notes="tiny random checkpoints in float32, GDN in bfloat16; V2 on a CPU, its kernels under Triton's "
        f"interpreter{notes}",
    )


def with_published(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the published rows with the given ones replaced, and rows of new families appended."""
    new = {(row["family"], row["runner"]): row for row in measured}
    rows = [new.pop((row["family"], row["runner"]), row) for row in read_rows("model_families")]
    return rows + list(new.values())


if __name__ == "__main__":
    run(model_families)
