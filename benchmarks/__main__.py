"""Run the short benchmarks (a few minutes in all): `make bench`. Run others by name, or `all`.

Benchmarks that read prompts take them from the folder in ELDR_PROMPTS, or from the demo's folder. Then write
the tables and plots of README.md and docs.

A module declares in `BENCHMARKS` when each of its benchmarks runs: "default"; "all", with `all` alone, since
it needs an engine or Ray Serve for longer; or "named", by its name alone, since it needs a GPU, an extra,
published routes or a trace.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError

_FOLDER = Path(__file__).parent


def read_benchmarks(path: Path) -> dict[str, str]:
    """Return `BENCHMARKS` of a module, without importing it, since many modules import engines."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="BENCHMARKS")], value=value):
                benchmarks: dict[str, str] = ast.literal_eval(value)
                return benchmarks
    return {}


# The other modules of `papers` have figures and methods that figures compare.
_BENCHMARKS = {
    path: read_benchmarks(path)
    for folder in ("", "engine", "serving", "papers")
    for path in (_FOLDER / folder).glob("[!_]*.py")
}
MODULES = {  # each benchmark's module, without the prefix `benchmarks.`
    name: ".".join(path.relative_to(_FOLDER).with_suffix("").parts)
    for path, names in _BENCHMARKS.items()
    for name in names
}
WHEN = {name: when for names in _BENCHMARKS.values() for name, when in names.items()}
NAMES = sorted(MODULES)
_IN_GROUPS = {name for names in _BENCHMARKS.values() if len(names) > 1 for name in names}


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Benchmarks; `all`: without those for GPUs. Default: the short ones."),
    ] = None,
) -> None:
    """Run benchmarks, write results to benchmarks/results, and rewrite the tables of the pages."""
    is_all = names == ["all"]
    runnable = [n for n in NAMES if WHEN[n] == "default" or (is_all and WHEN[n] == "all")]
    chosen_names = runnable if is_all else names or runnable
    unknown = [name for name in chosen_names if name not in NAMES]
    if unknown:
        raise UserInputError(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(NAMES)}")
    commands = [[MODULES[name], *([name] if name in _IN_GROUPS else [])] for name in chosen_names]
    for module, *rest in [*commands, ["lib.tables"], ["lib.plots"]]:
        typer.echo(f"== {' '.join([module, *rest])}")
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *rest], check=True)


if __name__ == "__main__":
    run(bench)
