"""Under vLLM's own profiler, nothing that our part of a step calls waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.profiled import operators_called, waiting_names
from tests.engine.scripts import run_script

RUNNERS = {"V1": "cpu_model_runner", "V2": "cpu.model_runner"}
COUNTS = {"copy_", "index_put_", "scatter_add_", "index_select", "argsort", "searchsorted"}
OURS, EXCLUDED = "eldr_serve/engine/", "host_copy.py("  # copies to the host have their own stream


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.long)])
def test_no_step_waits_for_the_device(model: Path, tmp_path: Path, runner: str) -> None:
    run_script("profile_script.py", model, tmp_path, v2=runner == "V2")
    assert (tmp_path / "runner").read_text() == f"vllm.v1.worker.{RUNNERS[runner]}"
    (trace,) = tmp_path.glob("*.json")
    our_operators, everything = operators_called(trace, OURS, EXCLUDED)
    assert our_operators >= COUNTS
    assert waiting_names(everything), "vLLM's own part of a step waits on CPUs, and no such call was seen"
    assert not waiting_names(our_operators)


def an_item(chosen: torch.Tensor) -> None:
    chosen.sum().item()


def a_truth(chosen: torch.Tensor) -> None:
    if chosen[0] > 3:
        chosen.add_(1)


def a_mask(chosen: torch.Tensor) -> None:
    chosen.nonzero()


def booleans(chosen: torch.Tensor) -> None:
    chosen[chosen > 2]


def a_list(chosen: torch.Tensor) -> None:
    chosen.tolist()


def an_array(chosen: torch.Tensor) -> None:
    chosen.numpy()


@pytest.mark.parametrize("waits", [an_item, a_truth, a_mask, booleans, a_list, an_array])
def test_a_waiting_call_is_found_in_a_trace(tmp_path: Path, waits: object) -> None:
    from torch.profiler import ProfilerActivity, profile

    trace, chosen = tmp_path / "trace.json", torch.arange(5)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        waits(chosen)  # type: ignore[operator]
    profiler.export_chrome_trace(str(trace))
    name = waits.__name__  # type: ignore[attr-defined]
    our_operators, everything = operators_called(trace, f": {name}", "nothing")
    assert waiting_names(our_operators)
    assert our_operators <= everything
    assert not waiting_names(operators_called(trace, ": another", "nothing")[0])
    assert not waiting_names(operators_called(trace, f": {name}", name)[0])
