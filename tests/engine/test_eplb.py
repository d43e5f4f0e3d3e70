"""Expert placement and replica choice in vLLM: its own EPLB on two ranks, and refused engines."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from benchmarks.lib.ports import free_port
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.eplb import PlacedWorker, read_experts_config
from tests.engine.scripts import run_script


def test_vllm_moves_weights_to_the_placement_and_routes_by_our_choice() -> None:
    run_script("eplb_script.py", free_port(), TRITON_INTERPRET="1")


def test_the_worker_has_the_arguments_of_vllms_worker() -> None:
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(worker.load_model).parameters.values()]
        for worker in (PlacedWorker, Worker)
    )
    assert ours == theirs


def config(given: Any = None, speculative: Any = None, use_async: bool = False, **parallel: Any) -> Any:
    switches = {"enable_eplb": True, "enable_elastic_ep": False, "enable_dbo": False} | parallel
    eplb = SimpleNamespace(use_async=use_async)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(eplb_config=eplb, **switches),
        speculative_config=speculative,
        additional_config=given if given is not None else {"eldr_experts": {"placement": "p.json"}},
    )


def test_a_config_is_read() -> None:
    assert read_experts_config(config()).replica_choice == "even"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_eplb": False}, "enable_eplb"),
        ({"use_async": True}, "use_async"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"enable_dbo": True}, "overlap"),
        ({"speculative": object()}, "speculative"),
        ({"given": {}}, "eldr_experts"),
        ({"given": {"eldr_experts": {"placement": "p.json", "replica_choice": "best"}}}, "replica_choice"),
        ({"given": {"eldr_experts": {"layers_per_slice": 0}}}, "layers_per_slice"),
    ],
)
def test_an_engine_that_cannot_hold_a_placement_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        read_experts_config(config(**settings))
