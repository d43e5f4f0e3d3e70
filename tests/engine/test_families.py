"""Every supported MoE family is counted exactly, under both of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import X86CPUUnquantizedExperts
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

from benchmarks.engine.model_families import RUNNERS, family_rows
from benchmarks.lib.families import FAMILIES
from tests.support.cpu_features import available

ALWAYS = {  # one kind of KV cache each: full attention, MLA, sliding windows, recurrent states
    ("Qwen3-MoE", "V1"),
    ("DeepSeek-V2", "V1"),
    ("GPT-OSS", "V1"),
    ("Qwen3-Next", "V1"),
}
GROUPS = {"GPT-OSS": 2, "Gemma-4": 6, "Llama-4": 4, "Qwen3-Next": 4, "LFM2-MoE": 4, "Qwen3.5-MoE": 4}
REFUSED = {"ERNIE-4.5": "correction bias"}
MLA = {"DeepSeek-V2", "DeepSeek-V3", "Kimi-K2"}  # on CPUs vLLM prefills in one step, without a cache
# CPU feature that a family needs, and its name in the message about its absence.
NEEDS = {"DeepSeek-V2 for AMX": ("avx512_bf16", "AVX-512 with bfloat16")}
NEVER_PREEMPTED = {"Llama-4"}  # vLLM admitted only requests that it could finish
NEAR_TIE = 0.05  # share of the range of a router's scores, or its groups'; the largest measured was 0.030
Row = Callable[[str, str], dict[str, Any]]

everything = pytest.mark.parametrize(
    ("family", "runner"),
    [
        pytest.param(family, runner, marks=[] if (family, runner) in ALWAYS else pytest.mark.families)
        for family in FAMILIES
        for runner in RUNNERS
    ],
)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Row:
    """Return the table row of a family and runner. All selected ones are served together."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and "found" in item.fixturenames
    ]
    by_family_and_runner = {
        (row["family"], row["runner"]): row
        for runner in RUNNERS
        for row in family_rows(
            dict.fromkeys(c["family"] for c in chosen if c["runner"] == runner),
            [runner],
            tmp_path_factory.mktemp(runner),
        )
    }
    return lambda family, runner: by_family_and_runner[family, runner]


@everything
def test_a_family_is_counted_exactly_or_refused(found: Row, family: str, runner: str) -> None:
    row = found(family, runner)
    if family in REFUSED:
        assert not row["starts"]
        assert REFUSED[family] in row["note"]
        return
    feature, word = NEEDS.get(family, (None, ""))
    if feature is not None and feature not in available():
        assert not row["starts"]
        assert word in row["note"]
        return
    assert row["starts"], row["note"]
    assert row["captured"] == row["prompts_exact"] == row["decodes_exact"] == row["requests"] > 0
    assert (row["preemptions"] > 0) == (family not in NEVER_PREEMPTED)
    assert (row["in_several_steps"] > 0, row["with_prefix_hit"] > 0) == (family not in MLA,) * 2
    assert len(row["kv_groups"].split("; ")) == GROUPS.get(family, 1)
    if FAMILIES[family].exact:
        assert row["differ_from_hf"] == row["tokens_near_ties"] == 0
    else:
        assert max(row["differ_from_hf"], row["differ_replayed"]) <= 0.02 * row["choices"]
        assert row["widest_gap"] <= NEAR_TIE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_amx_kernels_support_the_dimensions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run vLLM's own checks as if the CPU had AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    sizes = FAMILIES[family].settings
    neurons = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    layer: Any = SimpleNamespace(
        hidden_dim=sizes["hidden_size"],
        intermediate_size_per_partition=neurons,
        activation=MoEActivation.SWIGLUOAI,  # vLLM pads layers with other activations
    )
    assert X86CPUUnquantizedExperts._supports_grouped_gemm(layer) == (True, None)
    if "kv_lora_rank" in sizes:  # the two products of AMXMLAImpl, [out, in]
        rank = sizes["kv_lora_rank"]
        for out, into in ((rank, sizes["qk_nope_head_dim"]), (sizes["v_head_dim"], rank)):
            assert check_cpu_sgl_kernel(out, into, torch.bfloat16)
