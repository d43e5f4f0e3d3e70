"""The build and `eldr check` refuse modified copies of the shipped files with the same sentence.

No engine is asked. test_check.py has the errors that only vLLM finds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from eldr_serve.app import build_app
from eldr_serve.config.application import EldrArgs
from eldr_serve.errors import ConfigurationError
from eldr_serve.preflight import check as checking
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import NodePool
from eldr_serve.validation import format_value
from tests.support.shipped import ROOT
from tests.unit.preflight.document_edits import MISSING, edit

NODES = [
    NodePool("nodes", 64, {"CPU": 64, "GPU": 8, "prefill": 8, "decode": 8, "ingress": 8}, memory_gib=999)
]


@dataclass(frozen=True)
class Wrong:
    """A file with one value changed.

    Attributes:
        path: location of the value in `args`, names joined by dots.
        value: the wrong value.
        words: expected words of the sentence, besides location and value.
        file: the shipped file to modify.
        place: location in the sentence, if it differs from `path`.
        hidden: whether the sentence must not show the value: it is a secret, or only its name is wrong.
    """

    path: str
    value: Any
    words: str = ""
    file: str = "cpu_demo"
    place: str | None = None
    hidden: bool = False

    def __str__(self) -> str:
        return f"{self.path}={'missing' if self.value is MISSING else json.dumps(self.value)}"


def args_of(file: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / f"deployments/{file}.yaml").read_text())
    return json.loads(json.dumps(document["applications"][0]["args"]))


# -- by hand ---------------------------------------------------------------------------------------------

E, D, P = "decode_config.engine_kwargs", "decode_config.deployment_config", "prefill_config"


def unknown_key(path: str, near: str = "", **options: Any) -> Wrong:
    """Return a case with a misspelt key, and the key that should be suggested."""
    where, _, name = path.rpartition(".")
    words = f"{name!r}" + (f": did you mean {near!r}?" if near else "")
    return Wrong(path, 98765, words, place=where, hidden=True, **options)


WRONG = [
    # an unknown key at each level
    unknown_key("ingres", "ingress"),
    unknown_key("rooter", "router"),
    unknown_key("decode_confg", "decode_config"),
    unknown_key("prefill_config.engine_kwarg", "engine_kwargs"),
    unknown_key("prefill_config.deployment_confg", "deployment_config"),
    unknown_key("decode_config.model_loading_config.model_sorce", "model_source"),
    unknown_key(f"{E}.max_num_seq", "max_num_seqs"),
    unknown_key(f"{E}.dtyp", "dtype"),
    unknown_key(f"{D}.num_replica", "num_replicas"),
    unknown_key(f"{D}.ray_actor_options.num_cpu", "num_cpus"),
    unknown_key(f"{D}.request_router_config.request_router_clas", "request_router_class"),
    unknown_key(f"{D}.autoscaling_config.max_replica", "max_replicas", file="qwen3_30b_8p16d"),
    unknown_key("ingress_deployment_config.num_replica", "num_replicas"),
    unknown_key("ingress.prot", "port"),
    unknown_key("path.kv_lease", "kv_lease_s"),
    unknown_key("router.polcy", "policy"),
    # missing keys
    Wrong("decode_config", MISSING, "decode_config is missing"),
    Wrong("decode_config.model_loading_config.model_id", MISSING, "name that requests use"),
    Wrong("prefill_config", {}),
    # deployments of the engines
    Wrong(f"{D}.num_replicas", 0, "at least 1"),
    Wrong(f"{D}.num_replicas", -2, "at least 1"),
    Wrong(f"{D}.num_replicas", "two", "whole number"),
    Wrong(f"{D}.num_replicas", 1.5, "whole number"),
    Wrong(f"{D}.num_replicas", "auto", "autoscaling_config with min_replicas and max_replicas"),
    Wrong(f"{D}.num_replicas", 3, "not both", place=D, file="qwen3_30b_8p16d"),
    Wrong(f"{D}.max_ongoing_requests", 0, "greater than 0"),
    Wrong(f"{D}.max_queued_requests", -5, "must be -1"),
    Wrong(f"{D}.health_check_period_s", 0, "greater than 0"),
    Wrong(f"{D}.graceful_shutdown_timeout_s", -1, "at least 0"),
    Wrong(f"{D}.ray_actor_options", 3, "must be"),
    Wrong(f"{D}.ray_actor_options.num_cpus", -1, "at least 0"),
    Wrong(f"{D}.ray_actor_options.num_gpus", "one", "a number"),
    Wrong(f"{D}.autoscaling_config.max_replicas", 2, "min_replicas", file="qwen3_30b_8p16d", place=""),
    Wrong(f"{D}.autoscaling_config.min_replicas", -1, "at least 0", file="qwen3_30b_8p16d"),
    Wrong(f"{D}.autoscaling_config.target_ongoing_requests", "x", "a number", file="qwen3_30b_8p16d"),
    Wrong(f"{D}.placement_group_bundles", [{"CPU": 1}], "placement_group_config"),
    Wrong("decode_config.deployment_config", [1], "mapping"),
    Wrong("ingress_deployment_config.num_replicas", 0, "at least 1"),
    Wrong("ingress_deployment_config.num_replicas", "many", "whole number"),
    Wrong("ingress_deployment_config.ray_actor_options.num_cpus", "all", "a number"),
    Wrong("ingress_deployment_config", 3, "mapping"),
    # the engines
    Wrong("decode_config.engine_kwargs", [], "mapping"),
    Wrong(f"{E}.max_num_seqs", -4, "at least 1"),
    Wrong(f"{E}.max_num_seqs", "many", "whole number"),
    Wrong(f"{E}.max_num_batched_tokens", 0, "at least 1"),
    Wrong(f"{E}.max_model_len", "16k", "whole number"),
    Wrong(f"{E}.dtype", "float33", "did you mean 'float32'?"),
    Wrong(f"{E}.block_size", 0, "greater than 0"),
    Wrong(f"{E}.kv_cache_dtype", "fp9", "did you mean"),
    Wrong(f"{E}.tensor_parallel_size", 0, "at least 1"),
    Wrong(f"{E}.gpu_memory_utilization", 3, "at most 1", file="qwen3_30b_8p16d"),
    Wrong(f"{E}.enable_prefix_caching", "maybe", "true or false"),
    Wrong(f"{E}.tool_call_parser", "hermess", "did you mean 'hermes'?"),
    Wrong(f"{E}.reasoning_parser", "deepseek_r2", "did you mean 'deepseek_r1'?"),
    Wrong(f"{E}.enable_auto_tool_choice", True, "tool_call_parser"),
    Wrong(f"{E}.model", "other", "model_loading_config", place="decode_config", hidden=True),
    Wrong(f"{E}.disable_log_stats", True, "log_engine_metrics", place="decode_config", hidden=True),
    Wrong("decode_config.runtime_env.env_vars.OMP_NUM_THREADS", 1, "put it in quotes"),
    Wrong("decode_config.runtime_env.env_vars", [1], "mapping"),
    Wrong("decode_config.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE", "much", "whole number"),
    Wrong("decode_config.runtime_env.env_vars.VLLM_NIXL_SIDE_CHANNEL_PORT", "x", "a port"),
    Wrong("decode_config.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE", 99999, "a port"),
    Wrong("decode_config.accelerator_config.kind", "npu", "'cpu'"),
    Wrong("decode_config.accelerator_type", "H9000", "unknown", file="qwen3_30b_8p16d"),
    Wrong(f"{D}.ray_actor_options.num_gpus", 4, "set it to 8", file="qwen3_235b_wide_ep"),
    Wrong(f"{E}.data_parallel_size", 4, "num_gpus is 8: set it to 4", file="qwen3_235b_wide_ep", place=D),
    Wrong(f"{E}.distributed_executor_backend", "mp", "processes of their replica", file="qwen3_235b_wide_ep"),
    Wrong("decode_config.placement_group_config.strategy", "PAK", "did you mean 'PACK'?"),
    Wrong("decode_config.placement_group_config", {}, "bundles"),
    Wrong("decode_config.log_engine_metrics", "maybe", "true or false"),
    Wrong("decode_config.llm_engine", "sglang", "must be 'vLLM'"),
    # roles that do not match
    Wrong(f"{P}.engine_kwargs.dtype", "bfloat16", "decode_config.engine_kwargs.dtype is 'float32'"),
    Wrong(f"{P}.engine_kwargs.max_model_len", 1024, "decode_config.engine_kwargs.max_model_len is 2048"),
    Wrong(f"{P}.engine_kwargs.block_size", 64, "decode_config.engine_kwargs.block_size is 32"),
    Wrong(f"{P}.engine_kwargs.tool_call_parser", "hermes", f"{E}.tool_call_parser is not given"),
    Wrong(f"{E}.tool_call_parser", "hermes", "prefill_config.engine_kwargs.tool_call_parser is not given"),
    Wrong(f"{E}.reasoning_parser", "deepseek_r1", "prefill_config.engine_kwargs.reasoning_parser is not"),
    Wrong(f"{E}.chat_template", "x.jinja", "prefill_config.engine_kwargs.chat_template is not given"),
    Wrong(f"{E}.revision", "main", "prefill_config.engine_kwargs.revision is not given"),
    Wrong(f"{P}.model_loading_config.model_id", "other", "decode_config.model_loading_config.model_id"),
    Wrong(f"{P}.model_loading_config.model_source", "/models/a", "decode_config.model_loading_config"),
    Wrong(f"{P}.model_loading_config.tokenizer_source", "/models/a", "decode_config.model_loading_config"),
    # the rest of the service
    Wrong("router.policy", "marginal-cots", "did you mean 'marginal-cost'?", place="router"),
    Wrong("router.parameters", {"afinity": 1}, "did you mean 'affinity'?", place="router"),
    Wrong("router.parameters", {"affinity": "x"}, "a number", place="router"),
    Wrong("router.table", "/nowhere/table.safetensors", ""),
    Wrong("router.predictor", "/nowhere/predictor.safetensors", ""),
    Wrong("router.shadow", {"name": "nearest"}, "'nearest'", place="router"),
    Wrong("ingress.port", 70000, "at most 65535"),
    Wrong("ingress.log_requests", "al", "did you mean 'all'?"),
    Wrong("ingress.tracing", {"endpoint": "collector"}, "URL", place="ingress.tracing.endpoint"),
    Wrong("path.queue_timeout_s", 24, "kv_lease_s", place="path"),
    Wrong("admin_key", 12345, "must be text", hidden=True),
    Wrong("admin_key", ["12345"], "must be text"),
]


# -- by the settings' own declarations -------------------------------------------------------------------


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, field) for all settings, including nested ones."""
    for name, field in model.model_fields.items():
        part = next((kind for kind in kinds(field.annotation) if issubclass(kind, BaseModel)), None)
        if part is not None and part.__module__.startswith("eldr_serve"):
            yield from leaves(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from kinds(argument)


def declared() -> Iterator[Wrong]:
    """Yield, for every setting, a value of a wrong type and one below the minimum."""
    for path, field in leaves(EldrArgs):
        if any(kind in (dict, bytes) for kind in kinds(field.annotation)):
            continue
        yield Wrong(path, [{"a": 1}])
        for bound in field.metadata:
            if hasattr(bound, "ge"):
                yield Wrong(path, bound.ge - 1, "must be")
            elif hasattr(bound, "gt"):
                yield Wrong(path, bound.gt, "must be")


GENERATED = [*WRONG, *declared()]


def test_no_case_occurs_twice_and_the_settings_of_each_section_have_cases() -> None:
    assert len({str(wrong) for wrong in GENERATED}) == len(GENERATED)
    sections = {wrong.path.partition(".")[0] for wrong in declared() if "." in wrong.path}
    assert sections == {"ingress", "path", "prefill_router", "router", "signatures"}


@pytest.fixture(autouse=True)
def no_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checking, "probe_engines", lambda engines: [ProbeResult() for _ in engines])


def errors_of(path: Path) -> list[str]:
    (outcome,) = checking.check_deployments([path], lambda path, device: NODES)
    return [finding.sentence for finding in outcome.findings if finding.severity == "error"]


def write_deployment(folder: Path, args: Any, **others: Any) -> Path:
    application = {"name": "eldr", "import_path": "eldr_serve.app:build_app", "args": args}
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump({"applications": [application], "http_options": {"port": 8001}} | others))
    models = folder / "models"
    if not models.exists():
        models.symlink_to(ROOT / "deployments/models")
    return path


@pytest.mark.parametrize("wrong", GENERATED, ids=str)
def test_build_and_check_refuse_an_error_with_the_same_sentence(wrong: Wrong, tmp_path: Path) -> None:
    args = args_of(wrong.file)
    if wrong.path.startswith("ingress.tracing."):
        edit(args, "ingress.tracing.endpoint", "http://127.0.0.1:4318/v1/traces")
    edit(args, wrong.path, wrong.value)
    with pytest.raises(ConfigurationError) as refused:
        build_app(json.loads(json.dumps(args)))
    message = str(refused.value)
    assert errors_of(write_deployment(tmp_path, args)) == [message]
    assert "\n" not in message
    assert (wrong.path if wrong.place is None else wrong.place) in message
    assert wrong.words in message
    if wrong.value is not MISSING and not isinstance(wrong.value, dict | list):
        assert (format_value(wrong.value) in message) != wrong.hidden
    assert "{'" not in message  # no Python dict
    assert len(message) < 600
    assert "12345" not in message  # no secret


# valid changes: (place, value) of each
RIGHT: dict[str, list[tuple[str, Any]]] = {
    "more_replicas": [(f"{D}.num_replicas", 3)],
    "replicas_by_default": [(f"{D}.num_replicas", None)],
    "scaled": [(f"{D}.num_replicas", None), (f"{D}.autoscaling_config", {"max_replicas": 3})],
    "a_parser_in_both": [(f"{part}.tool_call_parser", "hermes") for part in (f"{P}.engine_kwargs", E)],
    "a_shorter_length": [(f"{part}.max_model_len", 512) for part in (f"{P}.engine_kwargs", E)],
    "a_dtype_by_default": [(f"{P}.engine_kwargs.dtype", MISSING)],
    "dtypes_by_default": [(f"{P}.engine_kwargs.dtype", "auto"), (f"{E}.dtype", "auto")],
    "other_batches": [(f"{P}.engine_kwargs.max_num_batched_tokens", 512), (f"{E}.max_num_seqs", 8)],
    "numbers_as_text": [(f"{E}.max_num_seqs", "8"), ("path.kv_lease_s", "30")],
    "no_environment": [("decode_config.runtime_env", None), ("prefill_config.runtime_env", None)],
    "whole": [("prefill_config", MISSING)],
    "no_port": [("ingress.port", MISSING)],
    "another_policy": [("router.policy", "balance-band")],
    "a_shadow": [("router.shadow", {"name": "shortest-queue"})],
    "two_ingresses": [("ingress_deployment_config.num_replicas", 2)],
    "an_own_name": [("name", "mine"), ("admin_key", "secret")],
    "ports_elsewhere": [("decode_config.experimental_configs", {"NIXL_SIDE_CHANNEL_PORT_BASE": 24000})],
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_build_and_check_accept_valid_values(changes: list[tuple[str, Any]], tmp_path: Path) -> None:
    args = args_of("cpu_demo")
    for path, value in changes:
        edit(args, path, value)
    build_app(json.loads(json.dumps(args)))
    assert errors_of(write_deployment(tmp_path, args)) == []
