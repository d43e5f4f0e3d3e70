"""The use of Ray Serve LLM: another Ray is refused, and the connector is registered."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.vllm.compat import serve_llm
from eldr_serve.errors import ConfigurationError


def test_the_installed_ray_passes_the_check() -> None:
    serve_llm.check_ray()


@pytest.mark.parametrize(
    ("owner", "name", "replaced"),
    [
        (serve_llm.VLLMEngineConfig, "get_initialization_kwargs", None),
        (LLMConfig, "__private_attributes__", {}),
        (LLMServer, "_start_engine", lambda self: None),
        (serve_llm.GPUAccelerator, "requires_remote_initialization", None),
    ],
)
def test_another_ray_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, replaced: object
) -> None:
    if replaced is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, replaced)
    with pytest.raises(RuntimeError, match=r"which eldr-serve extends; it was checked on ray 2\.60"):
        serve_llm.check_ray()


@pytest.mark.parametrize("method", ["chat", "completions"])
def test_another_engine_is_refused_when_it_starts(method: str) -> None:
    with pytest.raises(RuntimeError, match=r"with vLLM .* uses; it was checked on ray 2\.60 with vLLM 0\."):
        serve_llm.openai_serving(object(), method)


def test_the_connector_may_be_registered_by_another_replica_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_name(name: str, backend: object) -> None:
        raise ValueError(f"'{name}' is already registered")

    factory = serve_llm.KVConnectorBackendFactory
    monkeypatch.setattr(factory, "register_backend", refuse_name)
    monkeypatch.setattr(factory, "is_registered", lambda name: name == "EldrConnector")
    serve_llm.register_connector()
    monkeypatch.setattr(factory, "is_registered", lambda name: False)
    with pytest.raises(ValueError, match="already registered"):
        serve_llm.register_connector()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_data_parallel_rank_has_a_port_and_resources_of_its_own(ranks: int) -> None:
    described = {
        "model_loading_config": {"model_id": "m", "model_source": "./no_model"},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {"data_parallel_size": ranks, "enable_expert_parallel": True},
    }
    spec = BACKEND.spec("decode", described, kv_lease_s=30.0)
    assert spec.ports(3) == [22000, 22000 + ranks, 22000 + 2 * ranks]
    engine = spec.config.get_engine_config()
    assert engine.num_devices == spec.ranks == ranks  # Ray's distance between the ports of two replicas
    assert len(engine.placement_bundles) == ranks
    assert engine.get_initialization_kwargs()["distributed_executor_backend"] == "uni"


def ranks_on_gpus(ranks: int, gpus: float | None, **arguments: Any) -> dict[str, Any]:
    """Return the configuration of engines with data-parallel ranks, on GPUs by default."""
    options = {} if gpus is None else {"ray_actor_options": {"num_gpus": gpus}}
    return {
        "model_loading_config": {"model_id": "m", "model_source": "./no_model"},
        "placement_group_config": {"bundles": [{"decode": ranks}]},
        "deployment_config": options,
        "engine_kwargs": {"data_parallel_size": ranks, "enable_expert_parallel": True, **arguments},
    }


@pytest.mark.parametrize("arguments", [{}, {"distributed_executor_backend": "uni"}])
def test_data_parallel_ranks_on_gpus_run_in_their_replica(arguments: dict[str, Any]) -> None:
    spec = BACKEND.spec("decode", ranks_on_gpus(4, 4, **arguments), kv_lease_s=30.0)
    assert (spec.device, spec.ranks, spec.ports(3)) == ("gpu", 4, [22000, 22004, 22008])
    (bundle,), _ = spec.placement_group()
    assert (bundle["GPU"], bundle["decode"]) == (4, 4)
    engine = spec.config.get_engine_config()
    assert engine.num_devices == 4
    assert engine.get_initialization_kwargs()["distributed_executor_backend"] == "uni"
    assert not engine.accelerator.requires_remote_initialization


@pytest.mark.parametrize(
    ("gpus", "arguments", "sentence"),
    [
        (None, {}, r"ray_actor_options\.num_gpus is 0: set it to 4, one for each data-parallel rank"),
        (8, {}, r"num_gpus is 8: set it to 4"),
        (4, {"distributed_executor_backend": "ray"}, r"distributed_executor_backend is 'ray'.*leave it out"),
        (4, {"distributed_executor_backend": "mp"}, r"distributed_executor_backend is 'mp'.*leave it out"),
    ],
)
def test_data_parallel_ranks_that_would_get_no_gpu_are_refused(
    gpus: float | None, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        BACKEND.spec("decode", ranks_on_gpus(4, gpus, **arguments), kv_lease_s=30.0)


def test_ray_makes_the_configuration_of_other_gpu_engines_in_a_task() -> None:
    config = ranks_on_gpus(1, None) | {"placement_group_config": {"bundle_per_worker": {"GPU": 1}}}
    engine = BACKEND.spec("decode", config, kv_lease_s=30.0).config.get_engine_config()
    assert engine.accelerator.requires_remote_initialization
    assert engine.get_initialization_kwargs()["distributed_executor_backend"] == "ray"
