"""`python -m offline.place`: its output, its files and its refusals."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.fitting.table import fit_table
from offline.expert_placement import director, director_paper, grace_paper, grouping, methods, relaxation
from offline.expert_placement.cost import LayerCost
from offline.place import METHODS, place
from tests.support.in_process import command, sentence
from tests.support.traces import save_trace, synthetic_trace

L, E = 4, 16


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trace(synthetic_trace(n=60, num_layers=L, num_experts=E), tmp_path_factory)


def run_place(trace: Path, out: Path, **options: Any) -> None:
    if str(options.get("method")).startswith("director"):
        options["cost"] = trace.with_name("cost.json")
        LayerCost(fixed_s=1e-5, per_expert_s=1e-8, per_token_s=1e-6).save(options["cost"])
    place(trace=trace, out=out, **{"method": "grace", "ranks": 4, "batch": 16, **options})


@pytest.mark.parametrize("method", METHODS)
def test_a_placement_is_written_with_its_report(
    method: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redundant = 0 if method == "activation" else 4
    for name in ("p", "again"):
        run_place(trace, tmp_path / f"{name}.json", method=method, nodes=2, redundant=redundant)
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    placement = ExpertPlacement.load(tmp_path / "p.json")
    assert (placement.model, placement.physical_to_logical.shape[0], placement.num_experts) == ("m", L, E)
    assert (placement.method, placement.ranks, placement.nodes) == (method, 4, 2)
    assert placement.num_redundant == redundant
    assert placement.fingerprint == CalibrationTrace.load(trace).fingerprint
    top_k = CalibrationTrace.load(trace).top_k
    assert placement.expected_tokens is not None
    assert placement.expected_tokens.sum(axis=1) == pytest.approx([16 * top_k] * L, rel=1e-3)
    rules = ["-"] if method in ("activation", "director-paper") else ["turn", "metro", "local"]
    methods = [(row["placement"], row["replicas_by"]) for row in placement.report["held_out"]]
    assert methods == [("linear", "-"), *((method, rule) for rule in rules)]
    output = capsys.readouterr().out
    assert "experts_worst_rank" in output
    assert "p.meta.json" in output


def test_each_method_improves_its_own_objective(trace: Path, tmp_path: Path) -> None:
    held_out = {}
    for method in METHODS:
        run_place(trace, tmp_path / "p.json", method=method, nodes=2)
        held_out[method] = ExpertPlacement.load(tmp_path / "p.json").report["held_out"]
    linear, grace = held_out["grace"]
    copies = [row["near_copies"] + row["far_copies"] for row in (linear, grace)]
    assert copies[1] < 0.95 * copies[0]
    assert held_out["eplb"][1]["load_std_pct"] < linear["load_std_pct"]
    assert held_out["activation"][1]["experts_worst_rank"] <= linear["experts_worst_rank"]
    assert held_out["director"][1]["layer_us"] < held_out["director"][0]["layer_us"]


@pytest.mark.parametrize(
    ("method", "module", "rounding"),
    [("director", director, "round_in_polytope"), ("director-paper", director_paper, "round_with_scales")],
)
def test_directors_methods_solve_an_lp_and_round_it(
    method: str, module: Any, rounding: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[str] = Counter()

    def watch(watched: Any, name: str) -> None:
        original = getattr(watched, name)

        def call(*args: Any, **options: Any) -> Any:
            called[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(watched, name, call)

    watch(relaxation if method == "director" else module, "linprog")
    watch(module, rounding)
    run_place(trace, tmp_path / "p.json", method=method, redundant=4)
    assert called["linprog"] >= L
    assert called[rounding] >= L


@pytest.mark.parametrize(
    ("method", "form", "labels"),
    [("grace", grouping.OUR_GROUPING, "cluster_qr"), ("grace-paper", grace_paper.PAPER_GROUPING, "kmeans")],
)
def test_graces_methods_group_experts_by_their_own_form(
    method: str,
    form: grouping.Grouping,
    labels: str,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place_groups, clustering = Mock(wraps=methods.grace_placement), Mock(wraps=grouping.SpectralClustering)
    controlled = Mock(wraps=grace_paper.check_sizes)  # `controlled_groups` calls it there
    monkeypatch.setattr(methods, "grace_placement", place_groups)
    monkeypatch.setattr(grouping, "SpectralClustering", clustering)
    monkeypatch.setattr(grace_paper, "check_sizes", controlled)
    run_place(trace, tmp_path / "p.json", method=method, nodes=2)
    assert place_groups.call_args.kwargs["grouping"] is form
    assert {call.kwargs["assign_labels"] for call in clustering.call_args_list} == {labels}
    assert controlled.called == (method == "grace-paper")


def test_each_decode_worker_gets_its_own_placement(trace: Path, tmp_path: Path) -> None:
    table, _ = fit_table(CalibrationTrace.load(trace), 3)
    table.save(tmp_path / "table.safetensors")
    run_place(trace, tmp_path / "t.json", method="activation", cluster_of=tmp_path / "table.safetensors")
    run_place(trace, tmp_path / "w.json", method="activation", workers=3)
    for name in ("t", "w"):
        placements = [ExpertPlacement.load(tmp_path / f"{name}.{worker}.json") for worker in range(3)]
        assert [placement.report["held_out"][0]["worker"] for placement in placements] == ["0", "1", "2"]
        assert len({placement.to_json() for placement in placements}) == 3
        assert not (tmp_path / f"{name}.json").exists()


def test_cost_memory_and_vllms_format_can_be_added(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_place(trace, tmp_path / "p.json", export="vllm", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert "p.json, p.meta.json, p.vllm.jsonl not written" in capsys.readouterr().out
    cost = tmp_path / "cost.json"
    LayerCost(fixed_s=1e-5, per_expert_s=1e-6, per_token_s=1e-8, far_byte_s=1e-12).save(cost)
    run_place(trace, tmp_path / "p.json", redundant=8, cost=cost, expert_bytes=2.0**30, export="vllm")
    linear, *ours = ExpertPlacement.load(tmp_path / "p.json").report["held_out"]
    assert (linear["gib_a_rank"], ours[0]["gib_a_rank"]) == (L * 16 / 4, L * 24 / 4)
    assert linear["layer_us"] >= 10 + linear["experts_worst_rank"]
    record = json.loads((tmp_path / "p.vllm.jsonl").read_text())
    slots = json.loads((tmp_path / "p.json").read_text())["physical_to_logical_map"]
    assert list(record["initial_global_assignments"].values()) == slots


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"method": "nobody"},
            "unknown method 'nobody': there are activation, director, director-paper, eplb, grace, ",
        ),
        ({"method": "director"}, "give their --cost"),
        ({"ranks": 4, "nodes": 3}, "4 ranks cannot be split evenly over 3 nodes: change --nodes"),
        ({"ranks": 3}, "16 slots cannot be split evenly over 3 ranks"),
        ({"slots": 12}, "12 slots are not from 16"),
        ({"redundant": 52}, "68 slots are not from 16"),
        ({"redundant": 4, "slots": 20}, "give --slots or --redundant, not both"),
        ({"method": "activation", "redundant": 4}, "places every expert once"),
        ({"groups": 2}, "--groups is an option of method eplb"),
        ({"method": "eplb", "groups": 3}, "16 experts cannot be split evenly into 3 parts"),
        ({"workers": 31}, "cannot make 31 clusters"),
        ({"cluster_of": "nowhere.safetensors"}, "nowhere.safetensors cannot be read"),
        ({"cluster_of": "foreign.safetensors"}, "foreign.safetensors is for m with 4 layers of 8 experts"),
        ({"cost": "nowhere.json"}, "nowhere.json"),
        ({"cost": "cost.json"}, "cost.json is not a layer cost: per_expert_s is missing"),
        ({"trace": "nowhere.safetensors"}, "nowhere.safetensors cannot be read"),
        ({"trace": "nowhere.jsonl.gz"}, "nowhere.jsonl.gz cannot be read"),
        ({"trace": "bare.safetensors"}, "the trace holds no routes"),
        ({"out": "nowhere/p.json"}, "nowhere does not exist"),
        ({"out": "p.pt"}, "must end in .json"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    options: dict[str, Any], words: str, trace: Path, tmp_path: Path
) -> None:
    CalibrationTrace.load(trace).subset_without_routes(np.arange(60)).save(tmp_path / "bare.safetensors")
    fit_table(synthetic_trace(num_experts=8), 2)[0].save(tmp_path / "foreign.safetensors")
    (tmp_path / "cost.json").write_text('{"fixed_s": 1}')
    before = set(tmp_path.iterdir())
    arguments = {"trace": trace, "method": "grace", "ranks": 4, "batch": 16, "out": "p.json"} | options
    for name in arguments.keys() & {"trace", "cost", "cluster_of", "out"}:
        arguments[name] = tmp_path / arguments[name]
    assert words in sentence(command(place, **arguments))
    assert set(tmp_path.iterdir()) == before
