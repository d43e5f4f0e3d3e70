"""The use of Ray Serve LLM: another Ray is refused, and the connector is registered."""

from __future__ import annotations

import pytest
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.vllm.compat import serve_llm


def test_the_installed_ray_passes_the_check() -> None:
    serve_llm.check_ray()


@pytest.mark.parametrize(
    ("owner", "name", "replaced"),
    [
        (serve_llm.VLLMEngineConfig, "get_initialization_kwargs", None),
        (LLMConfig, "__private_attributes__", {}),
        (LLMServer, "_start_engine", lambda self: None),
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
    with pytest.raises(RuntimeError, match=r"which eldr-serve uses; it was checked on ray 2\.60"):
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
