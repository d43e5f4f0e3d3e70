"""`eldr check` on the shipped deployments, and on wrong ones that each get one sentence.

One process with vLLM probes the different engines of all of them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.preflight import check as checking
from eldr_serve.preflight.check import CheckOutcome, FindNodePools, check_deployments
from eldr_serve.preflight.engines import EngineProbe, ProbeResult, probe_engines
from eldr_serve.preflight.machine import GIB, NodePool, gpu_of, read_cluster, set_gpu
from eldr_serve.preflight.report import as_json
from tests.support.shipped import ROOT
from tests.unit.preflight.document_edits import MISSING, edit

pytestmark = pytest.mark.slow

SHIPPED = sorted((ROOT / "deployments").glob("*.yaml"))
CLUSTER = read_cluster(ROOT / "ray_cluster.yaml")
CPU = [NodePool("nodes", 1, {"CPU": 2}, memory_gib=24)]
ROLES = ("prefill_config", "decode_config")
QWEN = "qwen3_30b_8p16d"
D, P = "decode_config", "prefill_config"
SERVES_POLICY = "ray.serve.autoscaling_policy:replica_queue_length_autoscaling_policy"
SCALING = f"{D}.deployment_config.autoscaling_config"


def both(path: str, value: Any) -> dict[str, Any]:
    return {f"{role}.{path}": value for role in ROLES}


# name -> shipped file, changes of its args, words of its one error.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_config": (
        QWEN,
        both("model_loading_config", {"model_id": "qwen3-30b-a3b", "model_source": "Qwen/Other"}),
        "prefill_config.model_loading_config.model_source is 'Qwen/Other': its config.json is neither",
    ),
    "a_gpu_that_is_not_there": (QWEN, {f"{D}.accelerator_type": "B200"}, "accelerator_type B200"),
    "a_resource_that_is_not_there": (
        QWEN,
        {f"{D}.placement_group_config": {"bundle_per_worker": {"GPU": 1, "decoder": 1}}},
        "'decoder'",
    ),
    "too_many": (QWEN, {f"{SCALING}.max_replicas": 49}, "1 of 49 decode replicas find no node"),
    "too_large_for_the_gpu": ("qwen3_235b_2p8d", {f"{P}.accelerator_type": "H100"}, "find no node"),
    "no_room_for_a_sequence": (
        QWEN,
        {f"{P}.engine_kwargs.gpu_memory_utilization": 0.79},
        "holds no sequence",
    ),
    "weights_do_not_fit": (
        QWEN,
        {f"{P}.engine_kwargs.gpu_memory_utilization": 0.5},
        "prefill does not fit on H100",
    ),
    "hidden_choices": (
        "gpt_oss_120b_8p16d",
        {f"{P}.engine_kwargs.moe_backend": "triton"},
        "OAITritonMxfp4ExpertsMonolithic",
    ),
    "asynchronous_eplb": (
        "qwen3_235b_2p8d_eldr",
        {f"{D}.engine_kwargs.eplb_config.use_async": True},
        "asynchronous EPLB: set use_async to false",
    ),
    "a_replica_choice_that_does_not_exist": (
        "qwen3_235b_2p8d_eldr",
        {f"{D}.engine_kwargs.additional_config.eldr_experts": {"replica_choice": "best"}},
        "eldr_experts has the invalid value",
    ),
    "experts_that_the_ranks_do_not_divide": (
        "qwen3_235b_2p8d_eldr",
        {f"{D}.engine_kwargs.eplb_config.num_redundant_experts": 3},
        "131 experts and 4 EP ranks",
    ),
    "longer_than_the_model": ("qwen3_30b_whole", {f"{D}.engine_kwargs.max_model_len": 99999}, "99999"),
    "a_block_size_that_no_attention_takes": (
        "cpu_demo_whole",
        {f"{D}.engine_kwargs.block_size": 16},
        "decode_config.engine_kwargs.block_size is 16: attention on CPUs supports only multiples of 32",
    ),
    "block_sizes_of_two_defaults": (
        "cpu_demo",
        {f"{P}.engine_kwargs.block_size": 64},
        "block_size is 64 and decode",
    ),
    "dtypes_of_which_vllm_chooses_one": (
        "cpu_demo",
        {f"{P}.engine_kwargs.dtype": MISSING},
        "prefill_config.engine_kwargs.dtype is 'bfloat16' and decode_config.engine_kwargs.dtype is 'float32'",
    ),
    "what_vllm_refuses_by_itself": (
        "cpu_demo",
        {f"{P}.engine_kwargs.max_num_batched_tokens": 8},
        "prefill_config.engine_kwargs: max_num_batched_tokens (8) must be greater than or equal to",
    ),
    "speculative": (
        "qwen3_30b_whole",
        {f"{D}.engine_kwargs.speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "prefills and decodes, where rejected tokens would be counted: leave speculative_config out",
    ),
    "nixl_in_rays_ports": (
        QWEN,
        {f"{D}.experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": 19990}},
        "Ray's client and workers",
    ),
    "serves_own_scaling": (QWEN, {f"{SCALING}.policy": {"policy_function": SERVES_POLICY}}, "Serve's own"),
    "to_zero": (QWEN, {f"{SCALING}.min_replicas": 0}, "set min_replicas"),
    "ranks_apart": (
        QWEN,
        {
            f"{D}.engine_kwargs.tensor_parallel_size": 2,
            f"{SCALING}.max_replicas": 8,
            f"{SCALING}.initial_replicas": 8,
        },
        "8 of 8 decode replicas would each spread over several nodes",
    ),
    "too_little_memory": (
        "cpu_demo",
        {f"{D}.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE": "9"},
        "the engines on node nodes-0 need",
    ),
    "one_nixl_port": (
        "cpu_demo",
        {f"{D}.runtime_env.env_vars.VLLM_NIXL_SIDE_CHANNEL_PORT": "23000"},
        "share NIXL's port 23000",
    ),
    "nixl_ports_meet": (
        "cpu_demo",
        {f"{D}.experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": 20000}},
        "overlap decode's 20000-20001 on one node",
    ),
    "nixl_ports_of_ranks_meet": (
        "cpu_demo_wide_ep",
        {f"{P}.experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": 22001}},
        "prefill's NIXL ports 22001 overlap decode's 22000-22001 on one node",
    ),
    "ranks_that_do_not_divide_the_experts": (
        "qwen3_235b_wide_ep",
        {f"{D}.engine_kwargs.data_parallel_size": 6, f"{D}.deployment_config.ray_actor_options.num_gpus": 6},
        "128 experts on 6 data-parallel ranks: set data_parallel_size to a number that divides them",
    ),
    "ranks_with_a_share_of_each_expert": (
        "qwen3_235b_wide_ep",
        {f"{D}.engine_kwargs.enable_expert_parallel": False},
        "data-parallel ranks with a share of each expert: set enable_expert_parallel to true",
    ),
    "ranks_on_cpus_that_do_not_divide_the_experts": (
        "cpu_demo_wide_ep",
        {f"{D}.engine_kwargs.data_parallel_size": 3},
        "64 experts on 3 data-parallel ranks",
    ),
    "gpus_of_ranks_requested_twice": (
        QWEN,
        {
            f"{D}.deployment_config.ray_actor_options": {"num_gpus": 1},
            f"{D}.accelerator_type": "H200",
            f"{SCALING}.max_replicas": 4,
            f"{SCALING}.initial_replicas": 4,
        },
        "a decode replica requests 2 GPUs, but tensor_parallel_size x data_parallel_size is 1",
    ),
    "one_port_twice": (QWEN, {"ingress.port": 8000}, "both listen at port 8000"),
}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_oss_by_itself": ("gpt_oss_120b_8p16d", both("engine_kwargs.moe_backend", MISSING), ""),
    "on_l40s": (QWEN, {}, ""),
    "replicas": (
        "qwen3_235b_2p8d_eldr",
        {
            f"{D}.engine_kwargs.eplb_config.num_redundant_experts": 32,
            f"{D}.engine_kwargs.additional_config.eldr_experts": {"placement": "p.json"},
        },
        "",
    ),
}
ON_L40S = set_gpu(CLUSTER, gpu_of("L40S"))


def edited_document(name: str) -> dict[str, Any]:
    file, changes, _ = (WRONG | OTHERS)[name]
    document: dict[str, Any] = yaml.safe_load((ROOT / f"deployments/{file}.yaml").read_text())
    document = json.loads(json.dumps(document))  # then YAML aliases do not share their values
    for path, value in changes.items():
        edit(document["applications"][0]["args"], path, value)
    return document


def cluster(path: Path, device: str) -> list[NodePool]:
    if device == "cpu":
        return CPU
    if path.stem == "on_l40s":
        return ON_L40S
    small = path.stem == "ranks_apart"
    return [pool for pool in CLUSTER if not (small and pool.name.endswith("_of_8"))]


def probe_each_once(engines: Sequence[EngineProbe]) -> list[ProbeResult]:
    """Probe equal engines of several files once, since a probe of a large model takes a second."""
    keys = [json.dumps(asdict(engine), sort_keys=True) for engine in engines]
    different = dict(zip(keys, engines, strict=True))
    results = dict(zip(different, probe_engines([*different.values()]), strict=True))
    return [results[key] for key in keys]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckOutcome]:
    folder = tmp_path_factory.mktemp("deployments")
    (folder / "models").symlink_to(ROOT / "deployments/models")
    paths = list(SHIPPED)
    for name in (*OTHERS, *WRONG):
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(edited_document(name)))
    paths.append(folder / "get_started.yaml")
    (deployment,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/get_started.md").read_text(), re.DOTALL)
    paths[-1].write_text(deployment)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(checking, "probe_engines", probe_each_once)
        results = check_deployments(paths, cluster)
    return {path.stem: outcome for path, outcome in zip(paths, results, strict=True)}


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED])
def test_a_shipped_deployment_would_start(name: str, outcomes: dict[str, CheckOutcome]) -> None:
    outcome = outcomes[name]
    assert [finding.sentence for finding in outcome.findings] == []
    assert outcome.can_start
    for engines, _, answer in outcome.results:
        assert answer.kv_tokens >= answer.max_model_len, engines.role
        assert answer.kernels
        assert all(reveals_experts for _, reveals_experts in answer.kernels)


def test_the_recipe_to_get_started_would_start(outcomes: dict[str, CheckOutcome]) -> None:
    outcome = outcomes["get_started"]
    assert outcome.can_start
    assert [engines.role for engines, *_ in outcome.results] == ["prefill", "decode"]


def test_our_kernel_is_shown_where_vllms_choice_would_hide_routes(outcomes: dict[str, CheckOutcome]) -> None:
    outcome = outcomes["gpt_oss_by_itself"]
    assert outcome.can_start
    assert {name for *_, answer in outcome.results for name, _ in answer.kernels} == {"MarlinExperts"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_deployment_is_reported_in_one_sentence(name: str, outcomes: dict[str, CheckOutcome]) -> None:
    errors = [finding.sentence for finding in outcomes[name].findings if finding.severity == "error"]
    assert len(errors) == 1, errors
    assert WRONG[name][2] in errors[0]
    assert not outcomes[name].can_start
    assert "\n" not in errors[0]


def test_weights_equal_the_published_sizes(outcomes: dict[str, CheckOutcome]) -> None:
    """Compare with the parameters of the model cards, in billions of two bytes."""
    for name, published in {"qwen3_30b_8p16d": 30.5, "gemma_4_26b_8p16d": 25.2}.items():
        assert outcomes[name].results[0][2].weights / 2e9 == pytest.approx(published, abs=0.1)
    four = outcomes["qwen3_235b_2p8d"].results[0][2].weights
    assert 4 * four / 2e9 == pytest.approx(235, abs=0.5)
    placed, replicated = (
        outcomes[name].results[1][2].weights for name in ("qwen3_235b_2p8d_eldr", "replicas")
    )
    assert placed == four
    assert replicated - placed == 94 * 32 // 4 * 3 * 4096 * 1536 * 2
    # Each of 8 data-parallel ranks has an eighth of the experts, and everything else.
    experts = 94 * 128 * 3 * 4096 * 1536
    rank = outcomes["qwen3_235b_wide_ep"].results[1][2].weights / 2
    assert (rank + experts * 7 / 8) / 1e9 == pytest.approx(235, abs=0.5)
    experts, in_16_bits = 58 * 256 * 3 * 7168 * 2048, (2 * 129280 + 58 * 256) * 7168
    rank = outcomes["deepseek_v3_wide_ep"].results[1][2].weights - in_16_bits
    assert (rank + experts * 7 / 8) / 1e9 == pytest.approx(671, abs=0.5)


def test_the_shape_of_the_experts_is_that_of_the_models_configuration(
    outcomes: dict[str, CheckOutcome],
) -> None:
    shapes = {
        "qwen3_30b_8p16d": (48, 128),
        "qwen3_235b_2p8d": (94, 128),
        "replicas": (94, 128),
        "qwen3_235b_wide_ep": (94, 128),
        "deepseek_v3_wide_ep": (58, 256),
        "gpt_oss_120b_8p16d": (36, 128),
    }
    for name, shape in shapes.items():
        assert {result.expert_shape for *_, result in outcomes[name].results} == {shape}


def test_kv_tokens_equal_a_computation_by_hand(outcomes: dict[str, CheckOutcome]) -> None:
    """Qwen3-30B-A3B: 48 layers, keys and values, 4 heads of 128, 2 bytes, blocks of 16 tokens."""
    answer = outcomes["qwen3_30b_8p16d"].results[1][2]
    block = 16 * 48 * 2 * 4 * 128 * 2
    assert answer.kv_tokens == answer.kv // block * 16
    assert answer.kv == int(gpu_of("H100").memory_gib * GIB * 0.9) - answer.weights - answer.reserve


def test_kv_tokens_of_latent_attention_equal_a_computation_by_hand(outcomes: dict[str, CheckOutcome]) -> None:
    """DeepSeek-V3: 61 layers, 512 + 64 elements of 2 bytes a token, on each rank; blocks of 16 tokens."""
    for _, _, answer in outcomes["deepseek_v3_wide_ep"].results:
        assert answer.kv_tokens == answer.kv // (16 * 61 * 576 * 2) * 16


def test_json_output_is_complete(outcomes: dict[str, CheckOutcome]) -> None:
    report = json.loads(json.dumps(as_json(outcomes["qwen3_235b_2p8d"])))
    assert report["starts"]
    prefill, decode = report["engines"]
    assert prefill["nixl_ports"] == [*range(20000, 20008)]
    assert decode["replicas"] == {"min": 2, "initial": 8, "max": 8}
    held = [held for node in report["nodes"] if node["pool"] == "decode_of_8" for held in node["replicas"]]
    assert sorted(number for _, number in held) == list(range(8))


def test_the_command_prints_errors_and_exits_with_1(
    outcomes: dict[str, CheckOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/unit/test_package.py and tests/e2e/test_own_model.py run the whole command."""

    def checked(paths: list[Path], pools: FindNodePools, model: Path | None) -> list[CheckOutcome]:
        assert [pools(path, "gpu") for path in paths] == [ON_L40S]
        return [outcomes["on_l40s"]]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("eldr_serve.preflight.check.check_deployments", checked)
    words = ["check", "deployments/qwen3_30b_8p16d.yaml", "--gpu", "L40S", "--json"]
    done = CliRunner().invoke(app, words, prog_name="eldr")
    assert done.exit_code == 1, done.output
    (outcome,) = json.loads(done.stdout)
    assert [finding["severity"] for finding in outcome["findings"]] == ["error", "error"]
    assert all("does not fit on L40S" in finding["sentence"] for finding in outcome["findings"])
    assert len(ON_L40S) == len(CLUSTER)
