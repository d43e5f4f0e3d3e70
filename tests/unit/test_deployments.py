"""Every deployment YAML builds its application graph. No engine is started."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from eldr_serve.app import build_app
from tests.support.tables import unit_table

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# file -> maximum prefill replicas, maximum decode replicas, GPUs per replica, or those of each role
TOPOLOGIES: dict[str, tuple[int, int, int | tuple[int, int]]] = {
    "cpu_demo": (1, 2, 0),
    "cpu_demo_4d": (1, 4, 0),
    "cpu_demo_ep": (1, 2, 0),
    "cpu_demo_wide_ep": (1, 1, 0),
    "cpu_demo_eldr": (1, 2, 0),
    "cpu_demo_whole": (0, 4, 0),
    "qwen3_30b_8p16d": (8, 16, 1),
    "qwen3_30b_8p16d_eldr": (8, 16, 1),
    "qwen3_30b_whole": (0, 16, 1),
    "gpt_oss_120b_8p16d": (8, 16, 1),
    "gemma_4_26b_8p16d": (8, 16, 1),
    "qwen3_235b_2p8d": (2, 8, 4),
    "qwen3_235b_2p8d_eldr": (2, 8, 4),
    "qwen3_235b_wide_ep": (2, 4, (4, 8)),
    "deepseek_v3_wide_ep": (1, 4, (8, 8)),
}


def arguments(name: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "deployments" / f"{name}.yaml").read_text())
    assert document["applications"][0]["import_path"] == "eldr_serve.app:build_app"
    return copy.deepcopy(document["applications"][0]["args"])


def engines(app: Any) -> tuple[Any, Any]:
    """Return the deployments of prefill engines (None if decode engines are whole) and of decode engines."""
    bound = app._bound_deployment.init_kwargs
    return bound["prefill"] and bound["prefill"]._bound_deployment, bound["decode"]._bound_deployment


def most(deployment: Any) -> int:
    """Return the number of replicas of a deployment. Autoscaling starts with its maximum."""
    options = deployment._deployment_config
    if options.autoscaling_config is None:
        return int(options.num_replicas)
    assert options.autoscaling_config.initial_replicas == options.autoscaling_config.max_replicas
    return int(options.autoscaling_config.max_replicas)


def test_every_deployment_is_tested() -> None:
    assert {p.stem for p in (ROOT / "deployments").glob("*.yaml")} == set(TOPOLOGIES)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_serves_proxy_which_has_no_limits_is_open_to_this_machine_only(name: str) -> None:
    document = yaml.safe_load((ROOT / "deployments" / f"{name}.yaml").read_text())
    assert document["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_graph_matches_the_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    prefill, decode = engines(build_app(arguments(name)))
    num_prefill, num_decode, gpus = TOPOLOGIES[name]
    assert (most(prefill) if prefill else 0) == num_prefill
    assert most(decode) == num_decode
    of_prefill, of_decode = (gpus, gpus) if isinstance(gpus, int) else gpus
    roles = [(decode, "kv_consumer" if prefill else "kv_both", of_decode)]
    if prefill:
        roles.append((prefill, "kv_producer", of_prefill))
    for deployment, role, gpus_of_role in roles:
        config = deployment.init_kwargs["llm_config"]
        assert config.engine_kwargs["kv_transfer_config"]["kv_role"] == role
        assert config.engine_kwargs["scheduler_cls"] == "eldr_serve.engine.vllm.scheduler.EldrAsyncScheduler"
        bundles = deployment._replica_config.placement_group_bundles
        assert sum(bundle.get("GPU", 0) for bundle in bundles) == gpus_of_role
        assert config.model_id == decode.init_kwargs["llm_config"].model_id


@pytest.mark.parametrize(
    ("name", "settings", "executor"),
    [
        ("cpu_demo", {}, "uni"),
        ("cpu_demo", {"tensor_parallel_size": 2}, "mp"),
        ("cpu_demo", {"distributed_executor_backend": "mp"}, "mp"),
        ("qwen3_30b_8p16d", {}, "ray"),
        ("qwen3_30b_8p16d", {"distributed_executor_backend": "uni"}, "uni"),
    ],
)
def test_a_one_rank_engine_is_one_process_on_cpu_and_optionally_on_a_gpu(
    name: str, settings: dict[str, Any], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    args = arguments(name)
    args["decode_config"]["engine_kwargs"] |= settings
    config = engines(build_app(args))[1].init_kwargs["llm_config"]
    engine_config = pickle.loads(pickle.dumps(config)).get_engine_config()  # a replica does so
    assert engine_config.get_initialization_kwargs()["distributed_executor_backend"] == executor
    environment = engine_config.runtime_env["env_vars"] if engine_config.runtime_env else {}
    assert environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if executor == "uni" else None)


@pytest.mark.parametrize("name", ["qwen3_235b_wide_ep", "deepseek_v3_wide_ep"])
def test_a_replica_has_the_gpus_of_its_data_parallel_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    decode = engines(build_app(arguments(name)))[1]
    (bundle,) = decode._replica_config.placement_group_bundles
    assert bundle["GPU"] == decode._replica_config.ray_actor_options["num_gpus"] == 8
    config = pickle.loads(pickle.dumps(decode.init_kwargs["llm_config"])).get_engine_config()
    assert config.get_initialization_kwargs()["distributed_executor_backend"] == "uni"
    assert config.num_devices == 8
    assert not config.accelerator.requires_remote_initialization  # no GPU of the node is left for such a task


def test_the_router_starts_with_the_table_in_the_file_and_the_timeout_of_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    unit_table(2, model="eldr-demo").save(tmp_path / "table.safetensors")
    router = {"table": str(tmp_path / "table.safetensors")}
    app = build_app(arguments("cpu_demo") | {"router": router, "path": {"queue_timeout_s": 7.0}})
    spec = app._bound_deployment.init_kwargs["router_settings"]
    assert spec.table == unit_table(2, model="eldr-demo").to_bytes()
    assert spec.queue_timeout_s == 7.0  # value of the section `path`


def test_the_cluster_file_passes_rays_own_validation() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    for name in ("ray_cluster.yaml", "ray_cluster_local.yaml"):
        config = yaml.safe_load((ROOT / name).read_text())
        validate_config(prepare_config(config))
