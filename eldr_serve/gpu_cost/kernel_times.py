"""Kernel times that NVIDIA measured, and the times of steps made of them, from `aiconfigurator-core`.

No other module imports this Python package, which `eldr_serve.gpu_cost` calls "NVIDIA's package".
"""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eldr_serve.errors import UserInputError
from eldr_serve.gpu_cost.readings import PromptStep, Readings, Routing, Setting, Shape, StepReading
from eldr_serve.validation import did_you_mean

REQUIREMENT = "aiconfigurator-core==0.12.0"
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64)  # batches of up to 64 tokens at which MoE kernels were measured
CONTEXTS = (512, 1024, 2048, 4096, 8192)
PROMPTS = (512, 1024, 2048, 4096, 8192)  # prompt tokens of a step
# Kind of the weights -> the names in NVIDIA's package for matrix products and for experts.
DTYPES = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("fp8", "fp8"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "mxfp4": ("bfloat16", "w4a16_mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
_FRAMEWORK = "vllm"
_NO_ROWS = "its experts were not measured with such weights and parallel sizes"
_PROMPT_BATCHES = (8, 32)
_PROMPT_CONTEXT = 1024  # KV tokens of the requests that decode beside a prompt
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_installed() -> bool:
    """Return whether NVIDIA's package is installed."""
    return find_spec("aiconfigurator_core") is not None


def list_gpus() -> list[str]:
    """Return the GPUs on which MoE kernels were measured."""
    return sorted(path.parents[1].name for path in _root().glob(f"systems/data/*/moe/{_FRAMEWORK}"))


def list_models() -> list[str]:
    """Return the mixture-of-experts models that NVIDIA's package knows by name."""
    return sorted(name for name, path in _configs().items() if _has_experts(json.loads(path.read_text())))


def read(
    setting: Setting,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    config: str | None = None,
) -> Readings:
    """Read the steps of a model on a GPU: each batch with each context, with even and skewed routing.

    Args:
        config: content of the model's config.json; None: the config.json of `setting.model`.

    Raises:
        UserInputError: NVIDIA's package is not installed, does not know the model or the GPU, or has no
            rows for this kind of weights or for these parallel sizes.
    """
    gpus = list_gpus()
    if setting.gpu not in gpus:
        raise UserInputError(f"--gpu is {setting.gpu!r}, which is unknown; choose one of {', '.join(gpus)}")
    if setting.dtype not in (None, *DTYPES):
        raise UserInputError(
            f"--dtype is {setting.dtype!r}, which is unknown; choose one of {', '.join(DTYPES)}"
        )
    if setting.tp % setting.ep:
        raise UserInputError(f"--ep must be 1 or a divisor of --tp ({setting.tp}), got {setting.ep}")
    with _suppressed_log(), _model_path(setting.model, config) as path:
        return _read(setting, path, batches, contexts)


def _read(setting: Setting, path: str, batches: Sequence[int], contexts: Sequence[int]) -> Readings:
    from aiconfigurator_core import engine_spec_bincode_from_json
    from aiconfigurator_core.sdk.engine import EngineHandle

    with _refuse_failures(setting):
        spec = _model_spec(setting, path)
    moe_layers = _find_moe_layers(setting, spec)
    shape = _shape(setting, moe_layers)
    steps: list[StepReading] = []
    distributions: dict[Routing, str] = {"even": "balanced", "skewed": f"power_law_{shape.skew:g}"}
    for routing, distribution in distributions.items():
        for layers in moe_layers:
            layers["workload_distribution"] = distribution
        with _refuse_failures(setting):
            engine = EngineHandle(bytes(engine_spec_bincode_from_json(json.dumps(spec))))
        moe_ops = json.dumps([{"Moe": layers} for layers in moe_layers])
        for batch in batches:
            with _refuse_failures(setting):
                parts = engine.evaluate_ops_json(moe_ops, is_context=False, batch_size=batch, s=1)
            if any(origin != "silicon" for *_, origin in parts):
                raise _not_measured(setting, _NO_ROWS)
            for context in contexts:
                with _refuse_failures(setting):
                    step_ms = engine.predict_decode_latency(batch, context)
                steps.append(StepReading(batch, context, routing, 1e-3 * step_ms))
    prompts = []
    for tokens, batch in itertools.product(PROMPTS, _PROMPT_BATCHES):
        with _refuse_failures(setting):
            step_ms = engine.mixed_step_latency(tokens, batch, _PROMPT_CONTEXT, 2)
        prompts.append(PromptStep(batch, _PROMPT_CONTEXT, tokens, 1e-3 * step_ms))
    version = spec["engine"]["backend_version"]
    source = f"{REQUIREMENT.replace('==', ' ')}, kernels of vLLM {version}"
    return Readings(setting, source, shape, tuple(steps), tuple(prompts))


def _model_spec(setting: Setting, path: str) -> dict[str, Any]:
    """Return the model's steps as NVIDIA's package describes them."""
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.engine import build_engine_spec_json
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database, resolve_query_version

    products, experts = DTYPES[setting.dtype] if setting.dtype else (None, None)
    config = build_model_config(
        tp_size=setting.tp,
        pp_size=1,
        attention_dp_size=1,
        moe_tp_size=setting.tp // setting.ep,
        moe_ep_size=setting.ep,
        gemm_quant_mode=products,
        moe_quant_mode=experts,
    )
    model = get_model(path, config, _FRAMEWORK)
    version = resolve_query_version(setting.gpu, _FRAMEWORK, "current")
    spec = build_engine_spec_json(
        model,
        model_path=path,
        system=setting.gpu,
        backend=_FRAMEWORK,
        backend_version=version,
        kv_block_size=None,
        systems_path=None,
        nextn=0,
        database=get_database(setting.gpu, _FRAMEWORK, version),
    )
    model_spec: dict[str, Any] = json.loads(spec)
    return model_spec


def _find_moe_layers(setting: Setting, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the descriptions of the MoE layers in a decode step, which are parts of `spec`.

    Each description stands for a number of layers. The descriptions may differ only in this number.
    """
    moe_layers = list(_find_parts(spec["generation_ops"], "Moe"))
    if not moe_layers:
        raise UserInputError(f"{setting.model} has no MoE layers: only mixture-of-experts models are priced")
    kinds = {
        json.dumps({key: value for key, value in layers.items() if key not in ("name", "scale_factor")})
        for layers in moe_layers
    }
    if len(kinds) > 1:
        raise UserInputError(f"{setting.model} has MoE layers of {len(kinds)} kinds: only one kind is priced")
    return moe_layers


def _shape(setting: Setting, moe_layers: Sequence[dict[str, Any]]) -> Shape:
    first = moe_layers[0]
    return Shape(
        int(first["num_experts"]),
        int(first["topk"]),
        round(sum(layers["scale_factor"] for layers in moe_layers)),
        setting.ep,
        float(first["workload_distribution"].rpartition("_")[2]),
        first["quant_mode"],
    )


def _find_parts(document: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the value of each key `name` in a JSON document."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == name:
                yield value
            else:
                yield from _find_parts(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from _find_parts(value, name)


@contextmanager
def _model_path(model: str, config: str | None) -> Iterator[str]:
    """Yield the model for NVIDIA's package: a name that it knows, or a folder with a config.json."""
    from aiconfigurator_core.sdk.common import DefaultHFModels

    path = Path(model)
    if config is None:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            if model in DefaultHFModels:
                yield model
                return
            path = _find_known_config(model)
    try:
        config = path.read_text() if config is None else config
        if not isinstance(json.loads(config), dict):
            raise ValueError("it is not a mapping")
    except ValueError as error:
        raise UserInputError(
            f"--model is {model!r}: {path} is not a model's config.json ({error})"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        yield folder


def _find_known_config(model: str) -> Path:
    """Return the config.json of a model in NVIDIA's package; raise UserInputError if there is none."""
    configs = _configs()
    if model not in configs:
        hint = did_you_mean(model, list_models())
        raise UserInputError(
            f"--model is {model!r}: neither a known model nor a config.json; "
            f"{hint or '`eldr cost --list` names the models'}"
        )
    return configs[model]


def _configs() -> dict[str, Path]:
    """Return the config.json files in NVIDIA's package, by the model's name."""
    paths = _root().glob("model_configs/*_config.json")
    return {
        path.name.removesuffix("_config.json").replace("--", "/", 1): path
        for path in paths
        if not path.name.endswith("_hf_quant_config.json")
    }


def _has_experts(config: dict[str, Any]) -> bool:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any((part.get(name) or 0) > 1 for part in parts for name in _EXPERTS)


def _root() -> Path:
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise UserInputError(f"install the Python package aiconfigurator-core: pip install {REQUIREMENT}")
    return Path(spec.origin).parent


@contextmanager
def _refuse_failures(setting: Setting) -> Iterator[None]:
    """Raise UserInputError if NVIDIA's package fails in this block."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError, KeyError, TypeError) as error:
        raise _not_measured(setting, _reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError | TypeError):
        return f"the package cannot read its config.json ({error!r})"
    text = " ".join(str(error).split())
    if "data missing" in text:
        return _NO_ROWS
    if "missing system flops" in text:
        return "this GPU does not compute with such weights"
    return text.partition(". ")[0][:300]


def _not_measured(setting: Setting, reason: str) -> UserInputError:
    kind = f" in {setting.dtype}" if setting.dtype else ""
    where = f"{setting.model}{kind} on {setting.gpu}, TP {setting.tp}, EP {setting.ep}"
    return UserInputError(f"{where} has no measured kernel times: {reason}")


@contextmanager
def _suppressed_log() -> Iterator[None]:
    """Suppress the log of NVIDIA's package, which lists the files that it reads."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(level)
