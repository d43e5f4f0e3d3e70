"""Expert parallelism on CPU engines gives the answers and counts of one process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from eldr_serve.engine.vllm.compat import ep
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.moe import moe_layers
from eldr_serve.engine.vllm.ep.transfer import start_layer
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig, parse_experts_config
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology
from examples.demo_model import WEIGHTS
from offline.expert_placement.co_activation import co_activation
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.director import director_placement
from offline.expert_placement.grace import grace_placement
from offline.expert_placement.packed_placements import eplb_placement
from offline.widen import widen
from tests.engine.scripts import ROOT, run_script

EXPERT_PARALLEL = {"ELDR_EXPERT_PARALLEL": "1"}


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the answers and counts of one process."""
    answers = tmp_path_factory.mktemp("alone") / "alone.json"
    run_script("ep_script.py", model, "alone", answers)
    return answers


def test_two_ranks_answer_like_one_process_under_any_placement(model: Path, alone: Path) -> None:
    run_script("ep_script.py", model, "ranks", alone, **EXPERT_PARALLEL)


@pytest.mark.long
def test_two_compiled_ranks_answer_like_one_process(model: Path, alone: Path) -> None:
    # Traced as for GPUs; vLLM's switch for tests skips the C++ compiler, which saves a minute.
    compiled = {"TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_CI_ENV": "1"}
    run_script("ep_script.py", model, "compiled", alone, **EXPERT_PARALLEL, **compiled)


@pytest.mark.long
def test_four_ranks_migrate_between_the_placements_of_several_methods(tmp_path: Path) -> None:
    model, expected = (str(tmp_path / name) for name in ("model", "alone.json"))
    widen(WEIGHTS, 32, Path(model), heads=4)
    run_script("ep_script.py", model, "alone", expected)
    run_script("ep_script.py", model, "placed", expected, *methods(tmp_path, 80, 4), **EXPERT_PARALLEL)


def methods(folder: Path, slots: int, ranks: int) -> list[str]:
    """Write placements of the demo model by GRACE-MoE, EPLB and DIRECTOR for random routes."""
    rng = np.random.default_rng(0)
    routes = np.stack([rng.choice(64, 4, replace=False) for _ in range(600)]).reshape(100, 6, 4)
    load = np.stack([np.bincount(routes[:, layer].ravel(), minlength=64) for layer in range(6)])
    topology = Topology(ranks=ranks)
    cost = LayerCost(fixed_s=1e-4, per_expert_s=1e-5, per_token_s=1e-5, near_byte_s=0, far_byte_s=0)
    rows = {
        "grace": grace_placement(co_activation(routes, 64), load, slots, topology, seed=0)[0],
        "eplb": eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks),
        "director": director_placement(load, topology=topology, slots=slots // ranks, cost=cost)[0],
    }
    for name, placed in rows.items():
        placement = ExpertPlacement(placed, ranks, 64, model="eldr-demo", method=name)
        placement.save(folder / f"{name}.json")
    return [str(folder / f"{name}.json") for name in rows]


def test_vllm_finds_the_plugin_which_does_nothing_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    EntryPoint(name, value, "vllm.general_plugins").load()()
    assert not op_registry_oot
    module = value.split(":")[0]
    script = f"import sys; from {module} import register; register(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(UnsupportedEngineError, match=r"checked on vLLM 0\.32\.0 and not on 0\.33\.1"):
        ep.register_layers()
    assert not op_registry_oot


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"is_sequence_parallel": True}, "set tensor_parallel_size to 1"),
        ({"num_experts": 15}, "15 experts on 2 ranks"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_an_engine_with_inconsistent_ranks_is_refused(changes: dict[str, Any], reason: str) -> None:
    both = {
        "pipeline_parallel_size": 1,
        "speculative_config": None,
        "num_experts": 16,
        "is_sequence_parallel": False,
        "moe_parallel_config": SimpleNamespace(ep_size=2),
    } | changes
    config = SimpleNamespace(**both)
    config.parallel_config = config
    with pytest.raises(UnsupportedEngineError, match=reason):
        ep._check_supported(config, config)


@pytest.mark.parametrize(("use_ep", "refused"), [(True, True), (False, False)])
def test_without_the_switch_expert_parallelism_is_refused(use_ep: bool, refused: bool) -> None:
    layer = object.__new__(MoERunner)
    layer.__dict__ |= {
        "_modules": {},
        "_parameters": {},
        "_buffers": {},
        "router": object.__new__(CPURouter),
        "moe_config": SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=use_ep)),
    }
    layer.router.e_score_correction_bias = layer.router.custom_routing_function = None
    layer.router.use_grouped_topk, layer.router.scoring_func = False, "softmax"
    context = {"model.layers.0.mlp.experts": layer}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context), speculative_config=None
    )
    with pytest.raises(UnsupportedEngineError, match="ELDR_EXPERT_PARALLEL=1") if refused else nullcontext():
        assert moe_layers(config) == [(0, layer)]


@pytest.mark.parametrize(
    ("placement", "config", "sentence"),
    [
        (None, {"redundant_experts": 3}, "19 expert slots cannot be split evenly over 2 ranks"),
        (([[*range(16)]] * 2, 2), {}, "2 layers of 16 slots, but the model has 3 of 16"),
        (([[*range(16)]] * 3, 2), {"redundant_experts": 2}, "16 slots, but the model has 3 of 18"),
        (([[*range(16)]] * 3, 4), {}, "for 4 ranks, but the engine has 2"),
        (([[*range(18)]] * 3, 2), {"redundant_experts": 2}, "outside 0 to 15"),
    ],
)
def test_an_initial_placement_that_does_not_fit_is_refused(
    tmp_path: Path, placement: Any, config: dict[str, Any], sentence: str
) -> None:
    if placement is not None:
        rows, ranks = np.array(placement[0]), placement[1]
        file = tmp_path / "placement.json"
        ExpertPlacement(rows, ranks, rows.shape[1], model="tiny", method="by hand").save(file)
        config = config | {"placement": str(file)}
    with pytest.raises(UnsupportedEngineError, match=sentence):
        start_layer(
            [torch.nn.Parameter(torch.zeros(8, 4))],
            CpuExpertsConfig(**config),
            layer=0,
            num_layers=3,
            num_experts=16,
            topology=Topology(ranks=2),
            rank=0,
            group=None,
            max_decode_tokens=8,
        )


def test_the_error_names_a_misspelt_key() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"eldr_experts has the invalid value .*replica_choise"):
        parse_experts_config(CpuExpertsConfig, {"replica_choise": "metro"})
