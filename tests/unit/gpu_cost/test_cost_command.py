"""`eldr cost`: what it writes, who reads it, and bad input, after which nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.engine.gpu_cost import row_of
from eldr_serve.gpu_cost import kernel_times
from eldr_serve.gpu_cost.readings import Setting
from eldr_serve.router.settings import RouterSettings
from eldr_serve.scheduling.cost_file import FittedCost
from tests.support.in_process import command, sentence
from tests.unit.gpu_cost.fake_kernels import TERMS

GIVEN = {"model": "acme/Moe", "gpu": "h100_sxm"}


@pytest.mark.usefixtures("kernels")
def test_the_simulator_and_a_deployment_read_what_the_command_writes(tmp_path: Path) -> None:
    out, plot = tmp_path / "cost.json", tmp_path / "cost.png"
    done = command("offline.cost", **GIVEN, out=out, plot=plot, context="512,1024")
    assert done.exit_code == 0, done.stderr
    assert "per expert 4 us" in done.stdout
    assert "at most 0.0% with even" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    cost = FittedCost.load(out).cost
    assert cost.seconds(24, 900, 70, 5) == pytest.approx(TERMS.seconds(24, 900, 70, 5), rel=1e-4)
    assert RouterSettings(cost=out).cost == cost

    scenario = {
        "cluster": {"decode": {"workers": 2}},
        "arrivals": {"kind": "poisson", "rate_per_s": 20, "requests": 10, "prompt_tokens": 50},
        "policies": [{"name": "marginal-cost"}],
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    result = tmp_path / "result.json"
    config = tmp_path / "scenario.yaml"
    simulated = command("offline.simulate", config=config, cost=out, out=result)
    assert simulated.exit_code == 0, simulated.stderr
    used = json.loads(result.read_text())["inputs"]["cluster"]["decode"]["cost"]
    assert {int(size): added for size, added in used["batch_s"].items()} == cost.batch_s


@pytest.mark.usefixtures("kernels")
def test_the_list_names_gpus_and_models() -> None:
    done = command("offline.cost", "--list")
    assert done.stdout.split() == ["GPUs:", "h100_sxm", "h200_sxm", "models:", "acme/Moe", "acme/Moe-Large"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "acme/Mo"}, "--model is 'acme/Mo'"),
        ({"gpu": "b300"}, "--gpu is 'b300'"),
        ({"dtype": "mxfp4"}, "were not measured"),
        ({"context": "many"}, "--context must be comma-separated whole numbers, got 'many'"),
        ({"batches": "0,8"}, "--batches must be numbers from 1 to "),
        ({"batches": "1"}, "do not show what an expert costs"),
        ({"plot": "cost.doc"}, "--plot must end in .png"),
        ({"out": "no/such/folder/cost.json"}, "the folder no/such/folder does not exist"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_after_bad_input_nothing_is_written(
    changes: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert words in sentence(command("offline.cost", **(GIVEN | {"out": "cost.json"} | changes)))
    assert set(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("no_kernels")
def test_without_the_package_the_command_names_it() -> None:
    assert "pip install aiconfigurator-core==" in sentence(command("offline.cost", **GIVEN, out="cost.json"))
    assert "--list" in sentence(command("offline.cost", model="acme/Moe"))


@pytest.mark.usefixtures("kernels")
def test_the_benchmark_has_a_row_with_the_errors_of_each_batch() -> None:
    row = row_of(kernel_times.read(Setting("acme/Moe", "h200_sxm", 4, 4)))
    assert (row["model"], row["gpu"], row["tp"], row["ep"]) == ("acme/Moe", "h200_sxm", 4, 4)
    assert row["per_expert_us"] == pytest.approx(4)
    assert all(abs(row[f"error_pct_{batch}"]) < 1e-6 for batch in kernel_times.BATCHES)
    assert row["most_saved_pct_8"] < row["experts_share_pct_8"]
