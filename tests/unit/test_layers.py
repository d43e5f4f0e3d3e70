"""Which part of the repository may import which: each only those before it, and no file in a circle."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest
from shipped import imports, modules

# A part is a package or a module; of several that fit a module the longest name counts.
PARTS = (
    "eldr_serve.files",
    "eldr_serve.records",
    "eldr_serve.renamed",
    "eldr_serve.signature",
    "eldr_serve.expert_placement",
    "eldr_serve.artifacts",
    "eldr_serve.routing",
    "eldr_serve.experts",
    "eldr_serve.engine",
    "eldr_serve.serving",
    "eldr_serve.client",
    "eldr_serve.command",
    "eldr_serve",  # what `import eldr_serve` offers
    "tools",
    "loadgen",
    "demo_model",
    "offline",
    "studies",
    "benchmarks",
)
FILES = dict(modules())


def _imported(module: str) -> Iterator[str]:
    """Modules of ours that a module imports, wherever in it."""
    for name in imports(FILES[module]):
        for found in (name, name.rpartition(".")[0]):
            if found in FILES and found != module:
                yield found
                break


def _part(module: str) -> str:
    return max((part for part in PARTS if f"{module}.".startswith(f"{part}.")), key=len)


GRAPH = {module: set(_imported(module)) for module in FILES}


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter(GRAPH).prepare()  # raises CycleError, with the circle


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_those_before_it(part: str) -> None:
    allowed = set(PARTS[: PARTS.index(part) + 1])
    upwards = {
        f"{module} imports {name}"
        for module, names in GRAPH.items()
        if _part(module) == part
        for name in names
        if _part(name) not in allowed
    }
    assert not upwards, "\n".join(sorted(upwards))
