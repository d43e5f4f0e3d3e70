"""Run the benchmarks of some minutes in all: `make bench`; the others by name, or `all`.

Those that read prompts take them from the folder in ELDR_PROMPTS, or else the demo's. The tables and
plots of README.md and docs follow at the end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli import BadInput, run

NAMES = sorted(
    p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "common")
)
SERVING = {
    "capture_overhead",
    "handover",
    "live",
    "peers",
    "prefix_cache",
    "streams",
}  # minutes each, engines or Ray Serve
REPLAYS = {  # one engine for up to an hour each
    "balanced_clusters",
    "band_width",
    "decode_replay",
    "expert_weight",
    "pool_size",
    "rates",
    "signature_transforms",
    "simulator_validation",
}


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which; `all`; none runs those of some minutes in all.")
    ] = None,
) -> None:
    """Run benchmarks, results in benchmarks/results, and write the tables of the pages anew."""
    chosen = NAMES if names == ["all"] else names or [n for n in NAMES if n not in SERVING | REPLAYS]
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise BadInput(f"there is no {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in [*chosen, "harness.tables", "harness.plots"]:
        typer.echo(f"== {name}")
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    run(bench)
