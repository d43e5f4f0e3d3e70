"""Adapters in the engine arguments of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eldr_serve.engine.vllm.agreement import compare_specs
from eldr_serve.engine.vllm.check_config import check_config
from eldr_serve.engine.vllm.config import engine_kwargs
from eldr_serve.engine.vllm.spec import VllmSpec, make_llm_config
from eldr_serve.errors import ConfigurationError
from tests.support.shipped import ROOT

MODEL = ROOT / "examples" / "demo_model" / "weights"


def adapter(folder: Path, config: str = '{"r": 16}') -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    return str(folder)


def spec(modules: Any, *, model: str = str(MODEL), kind: str = "gpu", **kwargs: Any) -> VllmSpec:
    config = {
        "model_loading_config": {"model_id": "m", "model_source": model},
        "accelerator_config": {"kind": kind},
        "engine_kwargs": {"lora_modules": modules, **kwargs},
    }
    return VllmSpec(make_llm_config("decode", config, kv_lease_s=30.0))


def test_adapters_are_cards_of_the_model_and_arguments_of_the_engine(tmp_path: Path) -> None:
    path = adapter(tmp_path / "sql")
    described = spec([{"name": "sql", "path": path}, {"name": "law", "path": path}], max_cpu_loras=3)
    base, sql, law = described.model_cards
    assert [base["id"], sql["id"], law["id"]] == ["m", "sql", "law"]
    assert (base.get("parent"), sql["parent"], sql["root"]) == (None, "m", path)
    assert (described.adapters, described.adapter_slots) == (("sql", "law"), 3)
    assert described.arguments()["enable_lora"] is True
    assert "lora_modules" not in json.dumps(described.arguments())
    plain = spec(None)
    assert (plain.adapters, plain.adapter_slots, len(plain.model_cards)) == ((), 1, 1)


@pytest.mark.parametrize(
    ("modules", "kwargs", "sentence"),
    [
        ([{"name": "m", "path": "sql"}], {}, "has the name 'm' of the model or of another adapter"),
        ([{"name": "a", "path": "sql"}] * 2, {}, "has the name 'a' of the model or of another adapter"),
        ([{"name": "a", "path": "gone"}], {}, r"path of adapter 'a', 'gone', is not a folder"),
        ([{"name": "a", "path": "empty"}], {}, r"'a' needs .*empty/adapter_config\.json with its rank"),
        ([{"name": "a", "path": "sql"}], {"max_lora_rank": 8}, r"has rank 16, above .*max_lora_rank 8"),
        ([{"name": "a"}], {}, r"lora_modules.*path is missing"),
        ("sql=/sql", {}, r"engine_kwargs\.lora_modules must be a list"),
        ([{"name": "a", "path": "sql"}], {"kind": "cpu"}, r"lora_target_modules is missing: on CPUs vLLM"),
    ],
)
def test_an_adapter_that_engines_could_not_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: Any, kwargs: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter(tmp_path / "sql")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=sentence):
        spec(modules, **kwargs)


def test_an_adapter_on_other_machines_is_not_checked_here() -> None:
    assert spec([{"name": "a", "path": "/elsewhere"}], model="org/model").adapters == ("a",)


def test_both_roles_need_the_same_adapters(tmp_path: Path) -> None:
    modules = [{"name": "a", "path": adapter(tmp_path / "a")}]
    compare_specs(spec(modules), spec(modules))
    with pytest.raises(ConfigurationError, match=r"prefill_config\.engine_kwargs\.lora_modules is"):
        compare_specs(spec(modules), spec(None))


def test_rays_own_adapters_are_refused() -> None:
    config = {"model_loading_config": {"model_id": "m"}, "lora_config": {"max_num_adapters_per_replica": 2}}
    with pytest.raises(ConfigurationError, match=r"decode_config\.lora_config is not supported"):
        check_config("decode_config", config)


def test_a_cpu_engine_with_adapters_has_a_worker_that_keeps_the_kernel_of_experts() -> None:
    assert "worker_cls" not in engine_kwargs("decode", device="cpu")
    kwargs = engine_kwargs("decode", device="cpu", enable_lora=True)
    assert kwargs["worker_cls"] == "eldr_serve.engine.vllm.cpu_worker.EldrCpuWorker"
