"""How the connector finds a step's KV slots, under the calls of Model Runner V2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from eldr_serve.engine.vllm.capture.host_copy import HostCopy
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.kv_cache import CountedGroup
from eldr_serve.engine.vllm.kv import worker_side as connector_worker
from eldr_serve.engine.vllm.kv.connector import EldrConnector
from eldr_serve.engine.vllm.kv.metadata import EldrConnectorMetadata, StepCounts, StepPlan
from eldr_serve.engine.vllm.measurements import MEASUREMENTS
from eldr_serve.engine.vllm.stats import EldrStats
from eldr_serve.engine.vllm.step_timer import StepTimer

SLOTS = torch.tensor([64, 65, -1, -1])  # two tokens, padded to the size of a graph


class Worker(NixlPullConnectorWorker):
    """NIXL's worker side without transfers."""

    use_host_buffer = False

    def __init__(self) -> None: ...

    def shutdown(self) -> None: ...

    def start_load_kv(self, metadata: Any) -> None: ...

    def get_transfer_results(self) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> None: ...


class Capture:
    """An ExpertCapture that records the given slots."""

    def __init__(self) -> None:
        self.slots: list[Tensor] = []

    def count_last_step(self, slots: Tensor, plan: StepPlan) -> tuple[StepCounts, None]:
        self.slots.append(slots)
        return StepCounts(prompts={"r": HostCopy(np.zeros((1, 1), np.int32))}), None


def _of_layers(counted: Any) -> dict[str, Any]:
    """Return the metadata of the counted group's layer between layers with other slots or none."""
    return {
        "model.layers.0.attn": torch.tensor([7, 8, 9, 10]),
        "model.layers.1.attn": counted,
        "model.layers.2.linear_attn": None,
    }


class Runner:
    """A V2 step: vLLM's own driver of connectors over our connector's worker side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connector_worker, "get_tensor_model_parallel_rank", lambda: 0)
        self.capture = Capture()
        transfer = SimpleNamespace(kv_role="kv_consumer")
        config: Any = SimpleNamespace(use_v2_model_runner=True, kv_transfer_config=transfer)
        self.worker_side: Any = connector_worker.EldrConnectorWorker(
            config, CountedGroup(1, 32, "model.layers.1.attn"), num_blocks=8
        )
        self.worker_side.capture, self.worker_side.timer = self.capture, StepTimer("cpu")
        connector: Any = object.__new__(EldrConnector)  # a connector without NIXL's agent
        connector.__dict__ |= {
            "kv_transfer_config": transfer,
            "connector_worker": Worker(),
            "worker_side": self.worker_side,
        }
        self.connector = connector
        self.vllm: Any = object.__new__(ActiveKVConnector)
        self.vllm.__dict__ |= {
            "kv_connector": connector,
            "vllm_config": None,
            "_pending_load_kwargs": None,
            "_disabled": False,
        }

    def scheduler_output(self, tokens: int, requests: int | None = None) -> Any:
        """Return vLLM's SchedulerOutput of a step, reduced to what connectors read."""
        metadata = EldrConnectorMetadata()
        metadata.plan, metadata.held_prompts = StepPlan(requests=requests or tokens, tokens=tokens), {}
        return SimpleNamespace(
            kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set()
        )

    def step(
        self,
        tokens: int,
        forward: Tensor | None = None,
        graph: Tensor | None = None,
        *,
        requests: int | None = None,
    ) -> Any:
        """Run a step whose slots are in the forward's context, or only in a full CUDA graph's metadata."""
        batch = SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=tokens) if tokens else None
        attention = None if graph is None else _of_layers(SimpleNamespace(slot_mapping=graph))
        context = None if forward is None else ForwardContext({}, {}, _of_layers(forward))
        with override_forward_context(context):
            self.vllm.pre_forward(self.scheduler_output(tokens, requests), batch, attn_metadata=attention)
        self.vllm.finish_forward()
        with override_forward_context(ForwardContext({}, {}, {})):  # the context is empty, as in V2
            return self.vllm.post_forward(set())


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(monkeypatch)


def test_slots_come_with_the_forward_or_with_a_full_graph(runner: Runner) -> None:
    runner.step(2, forward=SLOTS)
    runner.step(2, graph=SLOTS)
    assert [s.tolist() for s in runner.capture.slots] == [SLOTS.tolist()] * 2


def test_counts_leave_with_their_own_step(runner: Runner) -> None:
    assert set(runner.step(2, forward=SLOTS).kv_connector_worker_meta.counts.prompts) == {"r"}
    assert runner.step(0).kv_connector_worker_meta is None


def test_counts_leave_with_their_own_step_if_v1_drafts_after_it(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: runner.connector)
    mixin = kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin
    monkeypatch.setattr(kv_connector_model_runner_mixin, "has_kv_transfer_group", lambda: True)
    for _ in range(2):
        with (
            override_forward_context(ForwardContext({}, {}, _of_layers(SLOTS))),
            mixin.maybe_get_kv_connector_output(runner.scheduler_output(2), defer_finalize=True) as output,
        ):
            pass
        mixin.finalize_kv_connector()
        assert set(output.kv_connector_worker_meta.counts.prompts) == {"r"}
    assert len(runner.capture.slots) == 2


def test_a_step_without_tokens_needs_none(runner: Runner) -> None:
    runner.step(2, forward=SLOTS)
    runner.step(0)
    assert len(runner.capture.slots) == 1


@pytest.mark.parametrize("slots", [None, SLOTS[:1]])
def test_a_step_with_unknown_slots_is_an_error(runner: Runner, slots: Tensor | None) -> None:
    runner.step(2, forward=SLOTS)  # the previous step's slots must not be used
    with pytest.raises(UnsupportedEngineError, match=r"vLLM 0\.\S+, Model Runner V2 ran 2 tokens"):
        runner.step(2, forward=slots)


def test_prompts_of_a_whole_replica_are_timed_separately_from_decode(runner: Runner) -> None:
    for prompt_key in (None, "local_prompt_tokens", "prompt_tokens"):
        runner.worker_side._prompt_key = prompt_key
        stats = runner.step(2, forward=SLOTS, requests=1).kv_connector_stats
        assert not stats.data["steps"]
        assert [prompt_key in record for record in stats.data["prompt_steps"]] == [True] * bool(prompt_key)
    (record,) = stats.data["prompt_steps"]
    seconds = record.pop("seconds")
    assert record == {"requests": 1, "kv_tokens": 0, "prompt_tokens": 1}
    other = EldrStats()
    other.data["prompt_steps"].append(record | {"seconds": seconds})
    both = other.aggregate(EldrStats({**EldrStats().data, "prompt_steps": other.data["prompt_steps"]}))
    assert not both.is_empty()
    MEASUREMENTS.take_steps()
    MEASUREMENTS.add_steps([], both.data["prompt_steps"])
    step_records = MEASUREMENTS.take_steps()
    assert step_records.prompts.tolist() == [2, 2, 0, 2, pytest.approx(2 * seconds)]
    assert (step_records.steps, step_records.seconds) == (0, 0)
    assert not MEASUREMENTS.take_steps().prompts.any()


def test_a_step_ends_with_its_forward_not_with_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr("eldr_serve.engine.vllm.step_timer.time.thread_time", lambda: next(now))
    timer = StepTimer("cpu")
    for expected in (2.0, 4.0):
        timer.begin()
        timer.stop()
        timer.stop()
        timer.finish({"requests": 1}, HostCopy(np.array([3, 4])))
        (record,) = timer.take_completed()
        assert record == {
            "requests": 1,
            "active_experts": 3.5,
            "active_by_layer": [3, 4],
            "seconds": expected,
        }
        assert timer.take_completed() == []
