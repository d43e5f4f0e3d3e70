"""Run the whole application on one GPU: a prefill and two decode engines over NIXL, three policies in turn.

    python -m benchmarks.serving.gpu_application --out out/gpu/application.json

This is the demo (`python -m offline.demo --gpu`) with short rounds: greedy answers must be equal under all
policies, and every request must be answered. Its files, including the report, are in a folder beside the
result. The engines share the GPU by time slicing, so a policy affects the experts that a decode step reads,
but hardly the times.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from benchmarks.lib import options
from benchmarks.lib.engines import check_device
from eldr_serve.commands.run import run
from eldr_serve.errors import ServiceFailedError
from eldr_serve.files import write_atomically
from loadgen.results import RESULTS

BENCHMARKS = {"gpu_application": "named"}
_SHORT = ("--rounds", "2", "--seconds", "4", "--warm-up-seconds", "1", "--first-table", "60")


def gpu_application(
    intermediate: options.Intermediate = 1024,
    more: Annotated[
        list[str] | None,
        typer.Argument(help="Further options of offline.demo, after --.", show_default="none"),
    ] = None,
    out: options.Out = None,
) -> None:
    """Serve the demo model on one GPU and compare the policies."""
    check_device("cuda")
    result = (out or RESULTS / "gpu_application.json").resolve()
    folder = result.with_suffix("")
    demo_options = ["--gpu", "--decode-engines=2", f"--intermediate={intermediate}", *_SHORT, *(more or ())]
    done = subprocess.run(
        [sys.executable, "-m", "offline.demo", *demo_options, "--out", str(folder)], check=False
    )
    if done.returncode:
        raise ServiceFailedError(f"the demo ended with status {done.returncode}; its output is in {folder}")
    write_atomically(result, (folder / "demo.json").read_text())


if __name__ == "__main__":
    run(gpu_application)
