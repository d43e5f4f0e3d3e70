"""Each command on a page is run here or by a test named here, or is left out for a stated reason."""

import ast
import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.router_protocol.messages import NamedPolicy
from eldr_serve.scheduling import StepCost
from tests.support.busy_router import E, L, busy_actor, running_live_page
from tests.support.ingress_app import KEY
from tests.support.pages import PAGES, code_lines
from tests.support.processes import output
from tests.support.shipped import ROOT
from tests.support.tables import unit_table
from tests.support.traces import synthetic_trace

_PROGRAMS = (
    "eldr",
    "make",
    "python",
    "curl",
    "locust",
    "serve",
    "ray",
    "kubectl",
    "helm",
    "podman",
    "haproxy",
    "pip",
    "git",
    "chrt",
    "pytest",
    "pre-commit",
)

# Beginning of a command line -> the test that runs the command.
TEST_BY_COMMAND = {
    "curl -N": "tests/e2e/test_serving.py::test_every_answer_names_its_worker_and_candidates",
    "eldr calibrate": "tests/e2e/test_serving.py::test_trace_from_a_ray_job_is_complete",
    "eldr check": "tests/unit/test_package.py::test_the_wheel_runs_in_an_empty_folder",
    "eldr check deployments/": (
        "tests/unit/preflight/test_check.py::test_the_command_prints_errors_and_exits_with_1"
    ),
    "eldr compare": "tests/unit/loadgen/test_compare.py::test_the_readmes_command_needs_no_load_and_no_model",
    "eldr cost": "tests/unit/gpu_cost/test_cost_command.py"
    "::test_the_simulator_and_a_deployment_read_what_the_command_writes",
    "eldr demo": "tests/e2e/test_demo.py::test_the_demo_writes_its_figures",
    "eldr drain": ("tests/unit/fleet/test_drain.py::test_the_command_waits_until_the_replica_has_no_calls"),
    "eldr experts": (
        "tests/e2e/test_expert_parallel.py::test_moving_experts_during_answers_does_not_change_them"
    ),
    "eldr fit-predictor": (
        "tests/unit/offline/test_predictor.py::test_the_command_writes_predictor_and_report"
    ),
    "eldr place --trace trace.safetensors --method director": (
        "tests/unit/offline/test_place_command.py::test_a_placement_is_written_with_its_report"
    ),
    "eldr predictor": (
        "tests/e2e/test_whole_replicas.py::test_a_predictor_that_does_not_fit_is_refused_and_the_old_one_stays"
    ),
    "eldr refit": "tests/e2e/test_serving.py::test_refit_swaps_a_table_for_the_live_replicas",
    "eldr refit --admin-key": "tests/e2e/test_signature_pool.py::test_an_operator_can_request_a_refit",
    "eldr routes": "tests/unit/offline/test_routes_command.py::"
    "test_options_say_which_tokens_are_prompt_and_answer",
    "eldr routes deepseek_v2_lite_routes.jsonl.gz --held-out": (
        "tests/unit/offline/test_routes_command.py::test_samples_are_drawn_and_held_out_by_domain"
    ),
    "eldr trace": "tests/e2e/test_signature_pool.py::test_saved_traffic_is_a_trace_that_can_be_fitted",
    "eldr reproduce": "tests/unit/papers/test_reproduce.py::test_without_arguments_it_lists_its_figures",
    "eldr simulate --calibrate-from http": (
        "tests/unit/offline/test_simulate_command.py::test_a_running_service_says_what_its_steps_cost"
    ),
    "eldr simulate --config examples/scenarios/": "tests/unit/offline/test_routes_command.py::"
    "test_the_example_is_simulated_by_size_cost_and_held_out_samples",
    "eldr simulate --config scenario.yaml --cost": (
        "tests/e2e/test_parallel_simulations.py::test_parallel_simulations_give_the_results_of_sequential_ones"
    ),
    "haproxy": "tests/unit/ingress/test_haproxy.py::test_requests_wait_while_no_ingress_listens",
    "locust": (
        "tests/unit/loadgen/test_locust.py::test_an_open_loop_sends_by_the_clock_and_records_every_request"
    ),
    "make docs": "tests/unit/test_docs_site.py::test_the_site_builds_strictly_and_fetches_from_no_other_host",
    "make package": "tests/unit/test_package.py::test_the_sdist_builds_the_same_wheel",
    "python -m benchmarks.engine.ep_nodes": (
        "tests/unit/benchmarks/test_ep_nodes.py::test_fewer_bytes_cross_if_a_token_is_sent_once_to_each_node"
    ),
    "python -m benchmarks.engine.gpu_cost": (
        "tests/unit/gpu_cost/test_cost_command.py::test_the_benchmark_has_a_row_with_the_errors_of_each_batch"
    ),
    "python -m benchmarks.papers.tail_price": (
        "tests/unit/benchmarks/test_tail_price.py::test_changes_are_against_the_best_balancer_of_each_seed"
    ),
    "python -m benchmarks.papers.at_scale": (
        "tests/unit/papers/test_at_scale.py::test_a_run_has_rows_by_workers_and_policy_and_resumes"
    ),
    "python -m benchmarks.gpu": (
        "tests/unit/benchmarks/test_gpu.py::test_the_command_writes_states_and_fails_with_a_step"
    ),
    "python -m offline.widen": "tests/unit/demo/test_demo_model.py::test_widening_keeps_the_logits",
    "python -m tests.faults chaos": (
        "tests/e2e/test_faults.py::test_processes_die_in_turn_and_no_request_is_lost"
    ),
    "python -m tests.faults mutate": (
        "tests/unit/faults/test_faults.py::test_every_mutation_of_the_code_is_found"
    ),
    "python -m tests.faults simulate": (
        "tests/unit/faults/test_faults.py::test_nothing_is_lost_whatever_fails"
    ),
    "python -m tests.fuzz": "tests/e2e/test_hostile_requests.py::test_hostile_requests_cause_no_failure",
    "python -m offline.refit": "tests/e2e/test_serving.py::test_refit_swaps_a_table_for_the_live_replicas",
    "python -m benchmarks.lib.screenshots": (
        "tests/unit/router/test_live_page.py::test_screenshots_are_small_and_fit_each_width"
    ),
    "pytest": "tests/unit/test_page_commands.py::test_the_example_of_one_test_selects_a_test",
    "serve run": "tests/e2e/test_own_model.py::test_the_served_model_is_compared_watched_and_stopped",
    "ray job submit": "tests/e2e/test_serving.py::test_trace_from_a_ray_job_is_complete",
}
REASON_WITHOUT_TEST = {
    "pre-commit install": "it changes the clone's git hooks",
    "make setup": "it installs the environment of the tests",
    "make demo": "it calls `eldr demo`, which is tested",
    "make test": "it is this test suite",
    "make lint": "CI runs it",
    "pip install": "a download; `make test-package` installs the wheel with its dependencies",
    "kubectl": "needs a cluster",
    "helm": "needs a cluster",
    "podman": "needs a container engine",
    "chrt": "only root may set the priority with which it runs `python -m benchmarks.engine.ep_layer`",
    "python -m venv router-venv": "a download",
    "python -m benchmarks.serving.peers": "plain vLLM servers for an hour; parts: test_benchmarks.py",
    "python -m benchmarks.serving.whole_replicas": "engines for hours; parts: test_whole_replicas.py",
    "python -m examples.demo_model.": "a download, and training for an hour; parts: test_demo_model.py",
    "python -m benchmarks.engine.ep_layer": "ranks for minutes; parts: test_parallel_layer.py",
    "python -m benchmarks.engine.ep_engine": "an engine for minutes; parts: test_ep_engine.py",
    "python -m benchmarks.serving.barrier": "engines for minutes; parts: test_barrier.py",
    "ray up ray_cluster.yaml": "a cloud; its file passes Ray's validation in tests/unit/test_deployments.py",
    "python -m benchmarks.serving.backlog": "real engines for minutes; virtual time: test_backlog.py",
    "python -m benchmarks.serving.objectives": (
        "real engines for minutes; virtual time: test_objectives.py, parts: test_objectives_benchmark.py"
    ),
    "python -m benchmarks.serving.stream_faults": "2,000 streams and minutes; its results are committed",
    "python -m benchmarks.serving.scaling": "six engines and minutes; its results are committed",
    "python -m benchmarks.serving.lost_nodes": "three Ray nodes and Redis; its results are committed",
    "python -m offline.live_placement": "a job without an end; its decisions are in test_live_placement.py",
    "python -m offline.position_placement": "a job without an end; tested by test_position_placement.py",
}
_INLINE = re.compile(r"`\.venv/bin/([^`]+)`")
RUN_WITHOUT_SERVICE = ("eldr deployments", "eldr keys", "eldr fit ", "eldr place", "eldr simulate")
FIT = "eldr fit --trace trace.safetensors --workers 2 --out table.safetensors"
TOKEN_COMMAND = "ray get-auth-token"
RUN_ON_SERVICE = ("eldr status", "eldr policy", "eldr table", "curl -X")
ALL_ENTRIES = (*TEST_BY_COMMAND, *REASON_WITHOUT_TEST, *RUN_WITHOUT_SERVICE, *RUN_ON_SERVICE, TOKEN_COMMAND)


def shown_lines() -> Iterator[str]:
    """Yield each command line in code blocks of the pages, and in their text if it is in .venv/bin."""
    for page in PAGES:
        for line in (*code_lines(page), *_INLINE.findall(page.read_text())):
            for part in re.split(r"&&|\s--\s|^\$ |(?<=\s)#\s", line.removeprefix("$ ")):
                words = part.split()
                if words and words[0] in _PROGRAMS and (words[0] != "python" or "-m" in words[:2]):
                    yield " ".join(words)


def entry_of(line: str) -> str | None:
    """Return the longest entry of the registry that the line begins with."""
    return max((k for k in ALL_ENTRIES if line.startswith(k)), key=len, default=None)


def lines_of(*beginnings: str) -> list[str]:
    return sorted({line for line in shown_lines() if entry_of(line) in beginnings})


def eldr(line: str, *beside: str, **environment: str) -> Any:
    words = [os.path.expandvars(word) for word in line.split()[1:]]
    return CliRunner().invoke(app, [*words, *beside], prog_name="eldr", env=environment)


def test_the_registry_and_the_commands_of_the_pages_correspond() -> None:
    lines = set(shown_lines())
    assert len(lines) > 60
    assert not [line for line in lines if entry_of(line) is None]
    used = {entry_of(line) for line in lines}
    assert not set(ALL_ENTRIES) - used
    assert entry_of("eldr nosuch") is None


@pytest.mark.parametrize("address", sorted(set(TEST_BY_COMMAND.values())))
def test_every_test_in_the_registry_exists(address: str) -> None:
    """A file alone, or the beginning of a test's name, is not enough."""
    file, _, test = address.partition("::")
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_example_of_one_test_selects_a_test() -> None:
    for line in lines_of("pytest"):
        _, file, _, word = line.split()
        assert re.search(rf"^(async )?def test_\w*{word}", (ROOT / file).read_text(), re.MULTILINE)


def docstring_commands() -> Iterator[tuple[str, str, set[str]]]:
    """Yield module, command and required options, for the commands in the docstrings of benchmarks."""
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        text = file.read_text()
        tree, ends = ast.parse(text), re.search(r"^    run\((\w+)\)$", text, re.MULTILINE)
        required: set[str] = set()
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef) or function.decorator_list:
                continue  # a settings class has the options of a decorated command
            if ends and function.name == ends[1]:
                arguments = function.args.args[: len(function.args.args) - len(function.args.defaults)]
                required = {f"--{argument.arg.replace('_', '-')}" for argument in arguments}
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for line in (ast.get_docstring(tree) or "").replace("\\\n", "").splitlines():
            if line.startswith("    python -m benchmarks."):
                yield name, line.strip(), required


def test_commands_in_docstrings_name_their_module_and_have_its_required_options() -> None:
    commands = list(docstring_commands())
    assert any(required for *_, required in commands)
    assert not [line for name, line, _ in commands if line.split()[2] != name]
    assert not [(line, left) for _, line, options in commands if (left := options - set(line.split()))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the files that commands on the pages read."""
    trace = synthetic_trace(n=60, num_layers=L, num_experts=E)
    trace.save(tmp_path / "trace.safetensors")
    unit_table(2, num_layers=L, num_experts=E).save(tmp_path / "table.safetensors")
    shutil.copytree(ROOT / "deployments", tmp_path / "deployments")
    (tmp_path / "placements").mkdir()
    for name in ("ray_cluster.yaml", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_deployment.yaml").write_text((ROOT / "deployments/cpu_demo.yaml").read_text())
    scenario = {
        "cluster": {"decode": {"workers": 2}},
        "arrivals": {"kind": "poisson", "rate_per_s": 20, "requests": 40, "prompt_tokens": 50},
        "policies": [{"name": "shortest-queue"}],
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    rng, cost = np.random.default_rng(0), StepCost(0.004, 1e-4, 2e-7, 5e-5)
    rows = rng.integers((1, 10, 4), (40, 9000, 380), (99, 3)).tolist()
    names = ("requests", "kv_tokens", "experts", "seconds")
    steps = [dict(zip(names, (*row, float(cost.seconds(*row))), strict=True)) for row in rows]
    (tmp_path / "steps.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_commands_of_the_pages_that_need_no_service_run(folder: Path) -> None:
    lines = lines_of(*RUN_WITHOUT_SERVICE)
    assert len(lines) > 12
    for line in sorted(lines, key=lambda line: RUN_WITHOUT_SERVICE.index(entry_of(line) or "")):
        if entry_of(line) == "eldr keys":
            continue  # they run below, in the order of their use
        if "--copy" in line:
            (folder / "my_deployment.yaml").unlink()
        if "--cluster-of" in line:
            assert eldr(FIT).exit_code == 0
        done = eldr(line)
        assert done.exit_code == 0, f"{line}: {done.output}"
    keys = {line.split()[2]: line.replace("/mnt/eldr/", "") for line in lines_of("eldr keys")}
    assert keys.keys() == {"add", "list", "revoke"}
    assert eldr(keys["add"]).exit_code == 0
    listed = json.loads(eldr(keys["list"]).stdout)
    (sha256,) = listed["search"]["keys"]
    assert eldr(keys["revoke"].replace("9f2c41", sha256)).exit_code == 0


@pytest.mark.slow
def test_rays_token_is_created_where_the_page_says(tmp_path: Path) -> None:
    (line,) = lines_of(TOKEN_COMMAND)
    output(Path(sys.executable).with_name("ray"), *line.split()[1:], env=os.environ | {"HOME": str(tmp_path)})
    assert (tmp_path / ".ray/auth_token").read_text().strip()


@pytest.mark.slow
async def test_commands_of_the_pages_that_operate_a_service_run(folder: Path) -> None:
    actor = busy_actor()
    async with running_live_page(actor) as (_, url):
        root = url.removesuffix("/eldr/")
        for line in lines_of("eldr status", "eldr policy", "eldr table"):
            if "my_package" in line:
                continue  # a policy of the reader
            done = await asyncio.to_thread(eldr, line, "--url", root, ELDR_ADMIN_KEY=KEY)
            assert done.exit_code == 0, f"{line}: {done.output}"
            if line == "eldr status":
                assert not re.search(r"\.\d{8}|\(\)", done.output)  # the output is readable
        assert actor.state.settings.table_version == 1
        assert actor.state.settings.policy in ("shortest-queue", "locality-band")
        for line in sorted(lines_of("curl -X"), reverse=True):  # PUT, then DELETE
            environment = os.environ | {"ELDR_ADMIN_KEY": KEY}
            command = line.replace("localhost:8000", root) + " --fail --silent --show-error"
            curl = await asyncio.create_subprocess_shell(
                command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
            )
            output, _ = await curl.communicate()
            assert curl.returncode == 0, output
            policy = NamedPolicy("shortest-queue") if "PUT" in line else None
            assert actor.state.settings.shadow == policy
