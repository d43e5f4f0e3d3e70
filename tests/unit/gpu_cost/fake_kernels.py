"""A package in place of aiconfigurator-core, whose steps cost exactly TERMS and COST_OF_A_PROMPT_TOKEN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eldr_serve.gpu_cost.readings import Shape
from eldr_serve.gpu_cost.routing import active_experts
from eldr_serve.scheduling import StepCost

TERMS = StepCost(3e-3, 2e-5, 3e-8, 4e-6, 1e-5)
CONFIGS = {
    "acme/Moe": {"num_experts": 32, "num_experts_per_tok": 4, "layers": 10, "heads": 8},
    "acme/Moe-Large": {"num_experts": 64, "num_experts_per_tok": 8, "layers": 20, "heads": 8},
    "acme/Dense": {"layers": 10, "heads": 8},
}
MODULES = (
    "__init__",
    "sdk/__init__",
    *(f"sdk/{n}" for n in ("engine", "models", "perf_database")),
    "sdk/config_builders",
    "sdk/common",
)
DefaultHFModels = {"acme/Moe"}


def write_package(folder: Path) -> None:
    """Write the package aiconfigurator_core, whose modules have the names of this one."""
    root = folder / "aiconfigurator_core"
    (root / "sdk").mkdir(parents=True)
    (root / "model_configs").mkdir()
    for gpu in ("h100_sxm", "h200_sxm"):
        (root / f"systems/data/{gpu}/moe/vllm").mkdir(parents=True)
    for module in MODULES:
        (root / f"{module}.py").write_text("from tests.unit.gpu_cost.fake_kernels import *\n")
    for name, config in CONFIGS.items():
        (root / f"model_configs/{name.replace('/', '--')}_config.json").write_text(json.dumps(config))
    (root / "model_configs/acme--Moe_hf_quant_config.json").write_text("{}")


def build_model_config(**parameters: Any) -> dict[str, Any]:
    return parameters


def get_model(path: str, parameters: dict[str, Any], framework: str) -> dict[str, Any]:
    config = CONFIGS.get(path) or json.loads((Path(path) / "config.json").read_text())
    if "architecture" in config:
        raise ValueError(f"The architecture {config['architecture']} is not supported. Supported: A, B")
    if config["heads"] % parameters["tp_size"]:
        raise ValueError(f"heads {config['heads']} should be divisible by tp_size {parameters['tp_size']}")
    return config | parameters | {"framework": framework}


def resolve_query_version(gpu: str, framework: str, version: str) -> str:
    return {"current": "0.24.0"}[version]


def get_database(gpu: str, framework: str, version: str) -> None:
    return None


def build_engine_spec_json(model: dict[str, Any], *, backend_version: str, **others: Any) -> str:
    def layers(number: int, **different: Any) -> dict[str, Any]:
        return {
            "Moe": {
                "name": f"moe_{number}",
                "scale_factor": number,
                "num_experts": model["num_experts"],
                "topk": model["num_experts_per_tok"],
                "moe_ep_size": model["moe_ep_size"],
                "quant_mode": model["moe_quant_mode"] or "bfloat16",
                "workload_distribution": "power_law_1.2",
            }
            | different
        }

    kinds = [{"Gemm": {"name": "qkv"}}]
    if "num_experts" in model:  # the layers are in two operations, one of which is inside another
        half = model["layers"] // 2
        other = {"inter_size": 9} if model.get("two_kinds") else {}
        kinds += [layers(half, **other), {"Overlap": {"group": [layers(model["layers"] - half)]}}]
    return json.dumps({"engine": {"backend_version": backend_version}, "generation_ops": kinds})


def engine_spec_bincode_from_json(spec: str) -> bytes:
    return spec.encode()


class EngineHandle:
    """Steps of a spec."""

    def __init__(self, spec: bytes) -> None:
        kinds = json.loads(spec)["generation_ops"]
        self.layers = [kinds[1]["Moe"], kinds[2]["Overlap"]["group"][0]["Moe"]]

    def evaluate_ops_json(self, ops: str, *, is_context: bool, batch_size: int, s: int) -> list[Any]:
        operators = [op["Moe"] for op in json.loads(ops)]
        assert [layers["scale_factor"] for layers in operators] == [n["scale_factor"] for n in self.layers]
        quant = operators[0]["quant_mode"]
        if quant == "w4a16_mxfp4":
            raise RuntimeError(f"perf database error: MoE data missing for {quant} at /somewhere")
        if quant == "nvfp4":
            raise ValueError("missing system flops: no fp4")
        return [(n["name"], 1.0, 0.0, "empirical" if quant == "fp8" else "silicon") for n in operators]

    def predict_decode_latency(self, requests: int, context: int) -> float:
        layer = self.layers[0]
        number = sum(layers["scale_factor"] for layers in self.layers)
        shape = Shape(layer["num_experts"], layer["topk"], number, layer["moe_ep_size"], 1.2, "")
        routing = "even" if layer["workload_distribution"] == "balanced" else "skewed"
        active = number * active_experts(requests, routing, shape)
        return 1e3 * float(TERMS.seconds(requests, requests * context, active))

    def mixed_step_latency(self, tokens: int, requests: int, context: int, answer: int) -> float:
        return self.predict_decode_latency(requests, context) + 1e3 * TERMS.per_prompt_token_s * tokens
