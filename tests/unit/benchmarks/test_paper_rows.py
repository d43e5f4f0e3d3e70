"""The page of the papers: each row has a known state, and names only methods and settings that exist."""

import re
from functools import cache
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from benchmarks.lib.tables import PAPERS, fill_blocks, has_result
from eldr_serve.config.application import EldrArgs
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig
from eldr_serve.experts.parallel.replica_choice import RULES
from eldr_serve.experts.signature import TRANSFORMS
from eldr_serve.scheduling.policies.length_predictors import LENGTH_PREDICTORS
from eldr_serve.scheduling.policies.registry import POLICIES
from eldr_serve.scheduling.types import PolicyError
from offline.expert_placement.methods import METHODS
from offline.simulation.cluster import Decode
from tests.support.shipped import PACKAGES, ROOT

STATES = ("exact", "selectable", "ours, better", "ours, worse", "rerun", "not here")
PLACES = {"service", "CPU engines", "GPU code", "offline", "simulator", "test bed", "-"}
CHOICES = {
    "--method": METHODS,
    "--transform": TRANSFORMS,
    "gather": get_args(CpuExpertsConfig.model_fields["gather"].annotation),
    "policy": POLICIES,
    "replica_choice": RULES,
    "prefill_replica_choice": RULES,
}
WORDS = {*POLICIES, *RULES, *TRANSFORMS, *METHODS, *LENGTH_PREDICTORS}
ROWS = [(paper, line) for paper, part in PAPERS.items() for line in part["lines"]]


def test_the_page_has_every_row() -> None:
    page = (ROOT / "docs/papers.md").read_text()
    assert fill_blocks(page) == page
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(PAPERS)
    for state in STATES:
        assert state in page


@pytest.mark.parametrize(("paper", "line"), ROWS, ids=[f"{paper}-{n}" for n, (paper, _) in enumerate(ROWS)])
def test_a_row_has_a_state_and_names_what_exists(paper: str, line: dict[str, Any]) -> None:
    part, here, how, where, *figures = line["cells"]
    assert re.match(rf"({'|'.join(STATES)})\b", here), (paper, part)
    assert set(re.split(r"; |, ", where)) <= PLACES, (paper, part)
    assert bool(figures) == ("result" in line), (paper, part)
    if figures:
        assert has_result(line["result"])
    if here.startswith("ours, "):
        assert figures, f"{paper}, {part}: no figure compares"
    for cell in line["cells"]:
        assert not re.search("never run|unreachable|undocumented", cell, re.IGNORECASE), (paper, part)
    for name in re.findall(r"`([^`]*)`", f"{part} {here} {how}"):
        assert exists(name), f"{paper}, {part}: {name}"


def exists(name: str) -> bool:
    """Return whether there is such a command, setting with this value, method, file or identifier."""
    words = name.split()
    if words[0] in ("eldr", "python"):  # tests/unit/test_docs_site.py checks commands and options
        return all(words[words.index(option) + 1] in CHOICES[option] for option in CHOICES if option in words)
    key, is_setting, value = name.partition(": ")
    if is_setting:
        return can_be_set(key, yaml.safe_load(value))
    if "/" in name:
        return (ROOT / name).exists()
    return name in WORDS or bool(re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", sources()))


def can_be_set(key: str, value: Any) -> bool:
    """Return whether a deployment, a simulated cluster, an engine or a policy takes this value of the key."""
    if key in CHOICES:
        return value in CHOICES[key]
    name, _, field = key.rpartition(".")
    if name:
        model = EldrArgs.model_fields[name].annotation
        assert isinstance(model, type)
        return takes(model, field, value)
    return takes(Decode, key, value) or any(
        key in policy.Parameters.model_fields and accepts(policy, key, value) for policy in POLICIES.values()
    )


def takes(model: type[BaseModel], key: str, value: Any) -> bool:
    if key not in model.model_fields:
        return False
    try:
        model.model_validate({key: value})
    except ValidationError as error:
        return all(wrong["loc"][:1] != (key,) for wrong in error.errors())
    return True


def accepts(policy: Any, key: str, value: Any) -> bool:
    try:
        policy(**{key: value})
    except PolicyError:
        return False
    return True


@cache
def sources() -> str:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return "\n".join(path.read_text() for path in paths)


@pytest.mark.parametrize(
    "name",
    [
        "eldr place --method nosuch",
        "eldr fit --transform nosuch",
        "policy: nosuch",
        "replica_choice: nosuch",
        "predictor: nosuch",
        "gate: 2",
        "nosuch: 1",
        "path.nosuch: 1",
        "prefill_router.max_kv_usage: 2",
        "deployments/nosuch.yaml",
        "no_such_identifier_at_all",
    ],
)
def test_what_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)
