"""What Serve is told of the ingress: time to drain, and what it scales by."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml
from ingress_app import running_app
from shipped import ROOT

from eldr_serve.app import engine_spec
from eldr_serve.config import EldrArgs
from eldr_serve.preflight.findings import drain


def options(**given: Any) -> dict[str, Any]:
    return EldrArgs(decode_config={}, ingress_deployment_config=given).ingress_deployment_config


def test_an_ingress_has_as_long_to_end_its_streams_as_an_engine() -> None:
    engine = engine_spec(
        {"model_loading_config": {"model_id": "m"}}, "decode", directory_name="d", kv_lease_s=30.0
    )
    own = engine.deployment_config["graceful_shutdown_timeout_s"]
    assert options()["graceful_shutdown_timeout_s"] == own
    assert options(num_replicas=2)["graceful_shutdown_timeout_s"] == 600
    assert not list(drain("ingress", options()))


@pytest.mark.parametrize(("cores", "ingresses"), [(2, 1), (3, 1), (4, 2), (64, 2)])
def test_there_are_two_ingresses_where_there_are_cores_unless_the_yaml_says_how_many(
    cores: int, ingresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert options()["num_replicas"] == ingresses
    assert options(num_replicas=3)["num_replicas"] == 3
    assert "num_replicas" not in options(autoscaling_config={"min_replicas": 1, "max_replicas": 4})


def test_the_yaml_may_say_less_and_eldr_check_warns() -> None:
    short = options(graceful_shutdown_timeout_s=20)
    assert short["graceful_shutdown_timeout_s"] == 20
    (finding,) = drain("ingress", short)
    assert finding.severity == "warning"
    assert finding.sentence.startswith("ingress replicas that stop are killed after 20 s")


def test_a_scaled_ingress_gets_our_policy_unless_it_names_one() -> None:
    scaled = options(autoscaling_config={"max_replicas": 4})["autoscaling_config"]
    assert scaled["policy"]["policy_function"].endswith(":by_requests_in_flight")
    named = {"policy": {"policy_function": "my.module:mine"}}
    assert options(autoscaling_config=named)["autoscaling_config"] == named


async def test_an_ingress_reports_what_it_has_in_flight() -> None:
    seen: list[Any] = []

    async def looking(sent: Any) -> Any:
        seen.append(await app.ingress.record_autoscaling_stats())
        yield b"{}"

    async with running_app(decode=looking) as app:
        assert (await app.post("/v1/completions", {"model": "m", "prompt": "x"})).status_code == 200
        assert seen == [{"in_flight": 1.0}]
        assert await app.ingress.record_autoscaling_stats() == {"in_flight": 0.0}


@pytest.mark.parametrize("name", ["cpu_demo", "qwen3_30b_8p16d"])
def test_a_shipped_one_drains(name: str) -> None:
    document = yaml.safe_load((ROOT / f"deployments/{name}.yaml").read_text())
    args = EldrArgs.model_validate(document["applications"][0]["args"])
    assert args.ingress_deployment_config["graceful_shutdown_timeout_s"] == 600
