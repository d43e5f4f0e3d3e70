"""An engine's memory, against numbers computed by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from eldr_serve.engine.protocol import StepSizes
from eldr_serve.preflight.deployment import EngineDeployment
from eldr_serve.preflight.engines import ProbeResult
from eldr_serve.preflight.machine import GIB, gpu_of
from eldr_serve.preflight.memory import FIXED_GIB, kv_bytes, reserve_bytes
from eldr_serve.preflight.rules import check_host_memory, check_memory

QWEN3_30B = StepSizes(
    tokens=16384, sequences=64, hidden=2048, top_k=8, expert_width=768, vocabulary=151936, element=2
)


def test_the_reserve_is_the_sum_of_its_parts() -> None:
    moe = 16384 * 8 * 2048 * 2 + 16384 * 8 * 2048 * 2  # both of the kernel's work areas are H wide here
    hidden = 6 * 16384 * 2048 * 2
    logits = 3 * 64 * 151936 * 4
    assert reserve_bytes(QWEN3_30B, "gpu") == 3 * GIB + moe + hidden + logits == 4_814_307_328
    fewer = reserve_bytes(QWEN3_30B, "gpu") - reserve_bytes(QWEN3_30B, "cpu")
    assert fewer == GIB / 2 == (FIXED_GIB["gpu"] - FIXED_GIB["cpu"]) * GIB


def test_the_kernel_gets_the_tokens_of_all_data_parallel_ranks() -> None:
    moe = 16384 * 8 * 2048 * 2 + 16384 * 8 * 2048 * 2
    eight = reserve_bytes(replace(QWEN3_30B, data_ranks=8), "gpu")
    assert eight - reserve_bytes(QWEN3_30B, "gpu") == 7 * moe


def test_the_rest_is_the_share_minus_the_reserve() -> None:
    assert kv_bytes(80, 0.9, 57 * GIB, 5 * GIB) == 10 * GIB
    assert kv_bytes(40, 0.9, 57 * GIB, 5 * GIB) == -26 * GIB


def test_a_small_cpu_cache_names_the_setting_of_its_size() -> None:
    spec: Any = SimpleNamespace(model_source="m", host_kv_variable="KV_SPACE")
    engines = EngineDeployment("whole", spec, 1, 1, 1, False, [], "PACK", "")
    answer = ProbeResult(weights=1, kv=GIB, kv_tokens=0, max_model_len=999, kernels=(("Experts", True),))
    (on_cpu,) = check_memory(engines, None, answer)
    assert on_cpu.sentence.endswith(
        "holds no sequence of max_model_len 999: raise KV_SPACE in "
        "decode_config.runtime_env.env_vars, or lower max_model_len"
    )
    (on_gpu,) = check_memory(engines, gpu_of("H100"), answer)
    assert on_gpu.sentence.endswith("lower max_model_len, or raise gpu_memory_utilization")


@pytest.mark.parametrize(("ranks", "sentences"), [(1, 0), (2, 0), (3, 1)])
def test_each_rank_of_a_cpu_engine_needs_memory(ranks: int, sentences: int) -> None:
    spec: Any = SimpleNamespace(device="cpu", ranks=ranks)
    engines = EngineDeployment("decode", spec, 1, 1, 1, False, [], "PACK", "")
    deployment: Any = SimpleNamespace(engines=[engines])
    answer = ProbeResult(weights=GIB, kv=2 * GIB, reserve=2 * GIB, kv_tokens=9, max_model_len=9, kernels=())
    node = SimpleNamespace(name="n", pool=SimpleNamespace(memory_gib=10), replicas=[("decode", 0)])
    placement: Any = SimpleNamespace(nodes=[node])
    assert len([*check_host_memory(deployment, placement, [answer])]) == sentences
