"""Check which MoE families start with vLLM's defaults and are counted exactly, under both model runners.

    python -m benchmarks.engine.model_families

transformers makes a tiny random checkpoint of each family. An engine serves prompts with shared prefixes
twice over few KV blocks.

    prompts_exact       requests whose prefill counts agree with the choices observed at the engine's routers,
                        token by token; should equal `captured`
    decodes_exact       the same for decode counts
    differ_from_hf      choices that differ from those of Hugging Face's model for the same tokens
    tokens_near_ties    tokens observed with several choices, since batches round differently
    differ_replayed     differences that remain when Hugging Face's model is forced to the engine's experts,
                        so that no difference causes others
    widest_gap          largest distance of such a difference from a tie, as a share of the score range
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
from benchmarks.lib.engines import ENGINE_ENV, TORCHVISION_CPU, TRITON_CPU
from benchmarks.lib.exact import histogram
from benchmarks.lib.families import FAMILIES, Reference
from benchmarks.lib.family_engine import CHUNK
from eldr_serve.commands.run import run
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.errors import UserInputError
from eldr_serve.experts.signature import unpack_counts
from loadgen.results import RESULTS, publish, read_rows

BENCHMARKS = {"model_families": "all"}
RUNNERS = ("V1", "V2")


def serve(checkpoints: dict[str, Path], runner: str, work: Path) -> dict[str, dict[str, Any]]:
    """Return each family's report (see family_engine), or {"error": the reason} where no engine started."""
    reports: dict[str, dict[str, Any]] = {}
    for torchvision in (False, True):
        names = [name for name in checkpoints if FAMILIES[name].torchvision == torchvision]
        if not names:
            continue
        folders = [*([TORCHVISION_CPU] if torchvision else []), *([TRITON_CPU] if runner == "V2" else [])]
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
        status = subprocess.run(
            [sys.executable, "-m", "benchmarks.lib.family_engine", str(folder / "jobs.json")],
            env=os.environ | ENGINE_ENV | environment,
            check=False,
            cwd=ROOT,
        ).returncode
        reports |= {name: read_report(folder / f"{name}.json", status) for name in names}
    return reports


def read_report(path: Path, status: int) -> dict[str, Any]:
    """Return an engine's report or, if it has none, its exit status as an error.

    The reports of the other engines still count.
    """
    if not path.exists():
        return {"error": f"the engines' process ended with status {status} before this one"}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def family_row(family: str, runner: str, checkpoint: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Return the table row of a family under a runner."""
    start = {"family": family, "runner": runner, "starts": "error" not in report}
    if "error" in report:
        return start | {"note": shorten(report["error"], 240)}
    records = report["records"]
    records_with_counts = [record for record in records if "eldr_prefill" in record]
    reference = Reference(checkpoint)
    replay_columns = {} if FAMILIES[family].exact else _compare_forced(records, reference)
    return (
        start
        | {
            "kv_groups": "; ".join(f"{kind} {size}" for kind, size in report["groups"]),
            "requests": len(records),
            "captured": len(records_with_counts),
            "prompts_exact": sum(map(_prompt_exact, records_with_counts)),
            "decodes_exact": sum(map(_decode_exact, records_with_counts)),
            "in_several_steps": sum(
                len(record["prompt"]) - record["cached"] > report["step_tokens"] for record in records
            ),
            "with_prefix_hit": sum(record["cached"] > 0 for record in records),
            "preemptions": int(report["preemptions"]),
            "choices": sum(np.size([choices[0] for choices in record["seen"]]) for record in records),
            "differ_from_hf": int(
                sum(
                    _not_among(_first_choices(record), reference.route(_computed_tokens(record))).sum()
                    for record in records
                )
            ),
            "tokens_near_ties": sum(len(choices) > 1 for record in records for choices in record["seen"]),
        }
        | replay_columns
    )


def _prompt_exact(record: dict[str, Any]) -> bool:
    """Return whether one observed choice for each token can give the counts."""
    counts = unpack_counts(record["eldr_prefill"]).astype(np.int64)
    choices = record["seen"][: len(record["prompt"])]
    shape = counts.shape
    certain = [of_token for of_token in choices if len(of_token) == 1]
    ambiguous = [of_token for of_token in choices if len(of_token) > 1]
    rest = counts - sum((histogram(np.array(of_token), shape) for of_token in certain), 0 * counts)
    options_of_tokens = [
        np.stack([histogram(np.array([choice]), shape) for choice in of_token]) for of_token in ambiguous
    ]
    most_of_rest = [
        sum((token.max(0) for token in options_of_tokens[n:]), np.zeros_like(rest))
        for n in range(len(options_of_tokens) + 1)
    ]

    def can_explain(number: int, rest: NDArray[np.int64]) -> bool:
        if (rest < 0).any() or (rest > most_of_rest[number]).any():
            return False
        return number == len(options_of_tokens) or any(
            can_explain(number + 1, rest - choice) for choice in options_of_tokens[number]
        )

    return can_explain(0, rest)


def _decode_exact(record: dict[str, Any]) -> bool:
    counts = unpack_counts(record["eldr_decode"])
    routes = np.sort(unpack_routes(record["eldr_routes"]), axis=-1)
    choices = record["seen"][len(record["prompt"]) :]
    if not np.array_equal(counts, histogram(routes, counts.shape)):
        return False
    return all(
        route in choices_of_token for route, choices_of_token in zip(routes.tolist(), choices, strict=True)
    )


def _computed_tokens(record: dict[str, Any]) -> list[int]:
    tokens: list[int] = record["prompt"] + record["output"][:-1]
    return tokens


def _first_choices(record: dict[str, Any]) -> NDArray[np.int64]:
    """Return [T,L,k]: the first observed choice of each token."""
    return np.array([known[0] for known in record["seen"]])


def _not_among(choices: NDArray[np.int64], other_choices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool[T,L,k]: choices that are not among `other_choices` of the same token and layer."""
    return np.asarray((choices[..., None] != other_choices[..., None, :]).all(-1))


def _compare_forced(records: list[dict[str, Any]], reference: Reference) -> dict[str, Any]:
    """Compare with Hugging Face's model while the engine's experts are forced on it.

    A different choice causes others in later layers and tokens. Forced, each difference stands alone.
    """
    differ, widest = 0, 0.0
    for record in records:
        engine_choices = _first_choices(record)
        forced_choices = reference.route(_computed_tokens(record), engine_choices)
        differences = _not_among(engine_choices, forced_choices)
        differ += int(differences.sum())
        for place in map(tuple, np.argwhere(differences.any(-1))):
            widest = max(
                widest,
                gap(engine_choices[place], forced_choices[place], reference.scores[place], reference.groups),
            )
    return {"differ_replayed": differ, "widest_gap": round(widest, 4)}


def gap(
    chosen: NDArray[np.int64],
    other_chosen: NDArray[np.int64],
    score: NDArray[np.float32],
    groups: tuple[int, int] = (1, 1),
) -> float:
    """Return how far two choices of a token's experts are from a tie, as a share of the score range.

    Args:
        chosen, other_chosen: int[k], the two choices.
        score: float[E]. The gap is how much more the experts score that only `other_chosen` has. If `chosen`
            has another group, the gap is one between the scores of groups.
        groups: number of groups, and how many of them the router chooses first, by the sum of their two best
            scores.
    """
    num_groups, num_first = groups
    if num_groups > 1:
        group_scores = np.sort(score.reshape(num_groups, -1))[:, -2:].sum(1)
        first_groups = np.argsort(group_scores)[-num_first:]
        other_scores = group_scores[np.setdiff1d(chosen * num_groups // len(score), first_groups)]
        if len(other_scores):
            return float((group_scores[first_groups].min() - other_scores.min()) / np.ptp(group_scores))
    only_chosen, only_other = np.setdiff1d(chosen, other_chosen), np.setdiff1d(other_chosen, chosen)
    return (
        float((score[only_other].max() - score[only_chosen].min()) / np.ptp(score))
        if len(only_chosen)
        else 0.0
    )


def family_rows(families: Iterable[str], runners: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """Return the rows of these families under these runners."""
    checkpoints = {name: FAMILIES[name].make(work / name) for name in families}
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(serve, checkpoints, runner, work) for runner in runners]
    reports = {runner: future.result() for runner, future in zip(runners, futures, strict=True)}
    return [
        family_row(name, runner, folder, reports[runner][name])
        for name, folder in checkpoints.items()
        for runner in reports
    ]


def model_families(
    families: Annotated[
        str,
        typer.Option(help="Families, comma-separated; other rows stay as published; default all."),
    ] = "",
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Serve every family under both runners, and compare the counts."""
    names = families.split(",") if families else list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise UserInputError(f"there is no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory() as work:
        new_rows = family_rows(names, RUNNERS, Path(work))
    inputs: dict[str, Any] = {"chunk_tokens": CHUNK}
    notes = ""
    if families:
        new_rows = merge_with_published(new_rows)
        commit = json.loads((RESULTS / "model_families.json").read_text())["commit"]
        inputs["families"] = names
        notes = f" Rows of families that are not among inputs.families are of commit {commit} or before."
    publish(
        "model_families",
        new_rows,
        inputs=inputs,
        seed=seed,
        out=out,
        notes="Tiny random checkpoints in float32; GDN in bfloat16. V2 runs on a CPU, with its kernels under "
        f"Triton's interpreter.{notes}",
    )


def merge_with_published(new_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the published rows, with `new_rows` in place of those of the same family and runner."""
    new = {(row["family"], row["runner"]): row for row in new_rows}
    published = [new.pop((row["family"], row["runner"]), row) for row in read_rows("model_families")]
    return published + list(new.values())


if __name__ == "__main__":
    run(model_families)
