"""Run the short benchmarks (a few minutes in all): `make bench`. Run others by name, or `all`.

Benchmarks that read prompts take them from the folder in ELDR_PROMPTS, or from the demo's folder. Then write
the tables and plots of README.md and docs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.commands.errors import run
from eldr_serve.errors import UserInputError

_GROUPS = {  # modules of several commands
    "ep_engine": ("ep_choice", "ep_shift"),
    "expert_use": (
        "activation_by_domain",
        "prefill_decode",
        "same_domain",
        "signature_quality",
        "signature_space",
    ),
    "replays": (
        "balanced_clusters",
        "band_width",
        "decode_replay",
        "pool_size",
        "rates",
        "signature_transforms",
        "tail_replay",
    ),
}
# `papers` also has the methods that figures compare.
_OF_PAPERS = (
    "balance_dispatch",
    "ep_policies",
    "fit_time",
    "shadow_simulated",
    "simulator_validation",
    "tail_price",
)
_FOLDER = Path(__file__).parent
MODULES = {  # by the benchmark's name, without `benchmarks.`
    name: f"{folder}.{stem}".lstrip(".")
    for folder, stems in (
        ("", ("gpu",)),
        *((f, tuple(p.stem for p in (_FOLDER / f).glob("[!_]*.py"))) for f in ("engine", "serving")),
        ("papers", _OF_PAPERS),
    )
    for stem in stems
    for name in _GROUPS.get(stem, (stem,))
}
NAMES = sorted(MODULES)
# Engines or Ray Serve for minutes each; one engine for up to an hour each.
SERVING = {
    "backlog",
    "capture_overhead",
    "channel_or_grpc",
    "ep_choice",
    "ep_policies",
    "ep_shift",
    "handover",
    "live",
    "lost_nodes",
    "model_families",
    "objectives",
    "peers",
    "prefix_cache",
    "prefix_hits",
    "ray_idle",
    "ray_up",
    "scaling",
    "shadow",
    "stream_faults",
    "streams",
    "whole_replicas",
}
REPLAYS = {*_GROUPS["replays"], "simulator_validation"}
# They need a GPU, an extra, published routes, and a trace.
NOT_HERE = {"gpu", "gpu_application", "step_cost", "gpu_cost", "tail_price", "barrier"}


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Benchmarks; `all`: without those for GPUs. Default: the short ones."),
    ] = None,
) -> None:
    """Run benchmarks, write results to benchmarks/results, and rewrite the tables of the pages."""
    runnable = [name for name in NAMES if name not in NOT_HERE]
    chosen_names = (
        runnable if names == ["all"] else names or [n for n in runnable if n not in SERVING | REPLAYS]
    )
    unknown = [name for name in chosen_names if name not in NAMES]
    if unknown:
        raise UserInputError(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}")
    names_in_groups = {name for names in _GROUPS.values() for name in names}
    commands = [[MODULES[name], *([name] if name in names_in_groups else [])] for name in chosen_names]
    for module, *rest in [*commands, ["lib.tables"], ["lib.plots"]]:
        typer.echo(f"== {' '.join([module, *rest])}")
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *rest], check=True)


if __name__ == "__main__":
    run(bench)
