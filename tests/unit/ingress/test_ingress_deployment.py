"""Serve's options for the ingress: replicas, time to drain, autoscaling; imports of a replica's process."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import yaml
from ray import cloudpickle, serve
from ray.serve._private.build_app import build_app as finalized

from eldr_serve.app import build_app, engine_spec
from eldr_serve.config.application import EldrArgs
from eldr_serve.engine.vllm.backend import VllmBackend
from eldr_serve.ingress.deployment import EldrIngress
from eldr_serve.ingress.http_application import application
from eldr_serve.preflight.rules import check_drain
from tests.support.ingress_app import running_app
from tests.support.shipped import ROOT

_REPLICA = """
import asyncio, gc, sys
from ray import cloudpickle

async def main():
    kind, arguments = map(cloudpickle.loads, cloudpickle.load(sys.stdin.buffer))
    import eldr_serve.integrations.decode_request_router  # its handles choose replicas there
    replica = kind.__new__(kind)
    assert gc.get_threshold()[2] == 10
    await kind.__init__(replica, **arguments)
    assert gc.get_threshold()[2] == 50, "full collections would stop the event loop"
    cors, *_ = replica.app.user_middleware
    assert cors.kwargs["allow_origins"] == ("https://chat.example.com",), cors
    replica._router.start()
    await replica.stop()

asyncio.run(main())
engines = ("vllm", "ray.llm", "torch")
engine_modules = sorted(name for name in sys.modules if any(f"{name}.".startswith(f"{e}.") for e in engines))
print("imported:", *engine_modules[:5])
import os
sys.stdout.flush()
os._exit(0)  # skip the destructor, which Serve awaits
"""


def options(**given: Any) -> dict[str, Any]:
    return EldrArgs(decode_config={}, ingress_deployment_config=given).ingress_deployment_config


def test_an_ingress_drains_as_long_as_an_engine() -> None:
    model = {"model_loading_config": {"model_id": "m"}}
    engine = engine_spec(model, "decode", directory_name="d", kv_lease_s=30.0)
    own = engine.deployment_config["graceful_shutdown_timeout_s"]
    assert options()["graceful_shutdown_timeout_s"] == own
    assert options(num_replicas=2)["graceful_shutdown_timeout_s"] == 600
    assert not list(check_drain("ingress", options()))


@pytest.mark.parametrize(("cores", "ingresses"), [(2, 1), (3, 1), (4, 2), (64, 2)])
def test_the_default_number_of_ingresses_depends_on_the_cores(
    cores: int, ingresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert options()["num_replicas"] == ingresses
    assert options(num_replicas=3)["num_replicas"] == 3
    assert "num_replicas" not in options(autoscaling_config={"min_replicas": 1, "max_replicas": 4})


def test_a_shorter_drain_time_in_the_yaml_is_kept_with_a_warning() -> None:
    short = options(graceful_shutdown_timeout_s=20)
    assert short["graceful_shutdown_timeout_s"] == 20
    (finding,) = check_drain("ingress", short)
    assert finding.severity == "warning"
    assert finding.sentence.startswith("ingress replicas that stop are killed after 20 s")


def test_an_autoscaled_ingress_gets_our_policy_unless_it_names_one() -> None:
    scaled = options(autoscaling_config={"max_replicas": 4})["autoscaling_config"]
    assert scaled["policy"]["policy_function"].endswith(":compute_desired_replicas")
    named = {"policy": {"policy_function": "my.module:mine"}}
    assert options(autoscaling_config=named)["autoscaling_config"] == named


async def test_an_ingress_reports_its_requests_in_flight() -> None:
    reports: list[Any] = []

    async def decode(sent: Any) -> Any:
        reports.append(await app.ingress.record_autoscaling_stats())
        yield b"{}"

    async with running_app(decode=decode) as app:
        assert (await app.post("/v1/completions", {"model": "m", "prompt": "x"})).status_code == 200
        assert reports == [{"in_flight": 1.0}]
        assert await app.ingress.record_autoscaling_stats() == {"in_flight": 0.0}


async def test_serve_awaits_the_destructor_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[Any] = []

    async def drain(replica: Any) -> None:
        drained.append(replica)

    monkeypatch.setattr(EldrIngress, "__del__", drain)
    replica = SimpleNamespace()
    await serve.ingress(application)(EldrIngress).__del__(replica)
    assert drained == [replica]


def ingress_replica() -> bytes:
    """Return what Serve's controller sends to a node that will run an ingress replica."""
    document = yaml.safe_load((ROOT / "deployments/cpu_demo.yaml").read_text())
    args = document["applications"][0]["args"]
    args["ingress"] = args.get("ingress", {}) | {"cors_origins": ["https://chat.example.com"]}
    resources = Mock(return_value={})  # there is no Ray cluster
    with patch.object(VllmBackend, "deployment_options", resources):
        built = finalized(build_app(args), name="app", default_runtime_env={})
    (ingress,) = (d for d in built.deployments if d.name == built.ingress_deployment_name)
    config = ingress._replica_config
    parts = (config.serialized_deployment_def, config.serialized_init_kwargs)
    return cloudpickle.dumps(parts)


def test_an_ingress_replica_has_its_options_and_imports_no_engine() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _REPLICA],
        input=ingress_replica(),
        capture_output=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode().splitlines()[-1].strip() == "imported:"
