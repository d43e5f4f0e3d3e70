"""Metrics that are sent to Ray once per second equal those that are sent in each step."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from ray.util import metrics as ray_metrics
from vllm.config import KVTransferConfig, ObservabilityConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics import ray_wrappers
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import (
    LoggingStatLogger,
    PerEngineStatLoggerAdapter,
    PrometheusStatLogger,
    StatLoggerManager,
)
from vllm.v1.metrics.perf import PerfStats
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    KVCacheEvictionEvent,
    MultiModalCacheStats,
    PrefixCacheStats,
    SchedulerStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from eldr_serve.engine.vllm.compat import buffered_metrics
from eldr_serve.engine.vllm.compat.buffered_metrics import BufferedStatLogger, replace_ray_logger
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.compat.nixl import NixlKVConnectorStats
from eldr_serve.engine.vllm.engine import VllmEngine
from eldr_serve.engine.vllm.measurements import MEASUREMENTS

Sent = dict[tuple[Any, ...], list[float]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return the values sent to Ray, by (kind, name, labels). The clock of vLLM's metrics is stopped."""
    values: Sent = defaultdict(list)

    def record(self: Any, value: float, tags: dict[str, str]) -> None:
        values[type(self).__name__, self._name, *sorted(tags.items())].append(value)

    monkeypatch.setattr(ray_metrics.Metric, "_record", record)
    monkeypatch.setattr(ray_wrappers, "time", SimpleNamespace(time=lambda: 1.0))
    monkeypatch.setattr(buffered_metrics, "_pending", buffered_metrics._Pending())
    return values


def _config() -> Any:
    config = MagicMock()
    config.model_config.served_model_name = "m"
    config.model_config.max_model_len = 2048
    config.model_config.is_diffusion = False
    config.observability_config = ObservabilityConfig(kv_cache_metrics=True)
    config.speculative_config.num_speculative_tokens = 2
    config.lora_config.max_loras = 2
    config.ec_transfer_config = None
    config.cache_config.metrics_info.side_effect = lambda: {"block_size": "16"}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="EldrConnector",
        kv_connector_module_path="eldr_serve.engine.vllm.kv.connector",
        kv_role="kv_both",
    )
    return config


def _step(draw: random.Random) -> dict[str, Any]:
    """Return stats of one step. All seconds are multiples of 1/1024, so that their sums are exact."""

    def count() -> int:
        return draw.randrange(5)

    def seconds() -> float:
        return draw.randrange(4096) / 1024

    def some(value: Any) -> list[Any]:
        return [value() for _ in range(count())]

    def prefix() -> PrefixCacheStats:
        sources = {draw.choice(list(CacheHitSource)): count()}
        return PrefixCacheStats(requests=1, queries=count(), hits=count(), hits_by_source=sources)

    def finished() -> FinishedRequestStats:
        counts = [count() for _ in range(4)]
        return FinishedRequestStats(draw.choice(list(FinishReason)), "r", seconds(), *counts, *some(seconds))

    nixl = NixlKVConnectorStats()
    for key in nixl.data:
        nixl.data[key] = some(lambda: 1 + count())
    own = {
        "nixl": draw.choice([None, nixl.data]),
        "steps": some(
            lambda: {
                "requests": count(),
                "kv_tokens": count(),
                "active_experts": count(),
                "active_by_layer": [count(), count()],
                "seconds": seconds(),
            }
        ),
        "prompt_steps": [],
        "capture_s": some(seconds),
        "kv_usage": draw.random(),
    }
    drafts = SpecDecodingStats.new(2)
    drafts.observe_draft(2, draw.randrange(3))
    scheduler = SchedulerStats(
        num_running_reqs=count(),
        num_waiting_reqs=count(),
        num_skipped_waiting_reqs=count(),
        num_kv_fetch_reqs_by_stage={"in_progress": count()},
        kv_cache_usage=draw.random(),
        prefix_cache_stats=prefix(),
        connector_prefix_cache_stats=draw.choice([None, prefix()]),
        kv_cache_eviction_events=some(
            lambda: KVCacheEvictionEvent(seconds(), seconds(), tuple(some(seconds)))
        ),
        spec_decoding_stats=draw.choice([None, drafts]),
        kv_connector_stats=draw.choice([None, own]),
        running_lora_adapters=dict.fromkeys(some(lambda: draw.choice("ab")), 1),
        perf_stats=PerfStats(count(), count(), count()),
    )
    iteration = IterationStats()
    iteration.num_generation_tokens = count()
    iteration.num_preempted_reqs = count()
    iteration.num_watermarked_reqs = count()
    tokens = iteration.prompt_token_stats
    tokens.computed, tokens.local_cache_hit, tokens.external_kv_transfer = count(), count(), count()
    tokens.cached_tokens, tokens.total = count(), count()
    iteration.max_num_generation_tokens_iter = some(count)
    iteration.n_params_iter = some(count)
    iteration.time_to_first_tokens_iter = some(seconds)
    iteration.inter_token_latencies_iter = some(seconds)
    iteration.finished_requests = some(finished)
    return {
        "scheduler_stats": draw.choice([scheduler, scheduler, None]),
        "iteration_stats": draw.choice([iteration, iteration, None]),
        "mm_cache_stats": draw.choice([None, MultiModalCacheStats(queries=count(), hits=count())]),
    }


def values_of_metrics(sent: Sent) -> dict[tuple[Any, ...], Any]:
    """Return what the metrics hold: a gauge its last value, a counter the sum, a histogram all values."""
    summaries = {"Gauge": lambda values: values[-1], "Counter": sum, "Histogram": list}
    return {key: summaries[key[0]](values) for key, values in sent.items()}


@pytest.mark.parametrize("seed", range(8))
async def test_batched_metrics_equal_those_recorded_in_each_step(sent: Sent, seed: int) -> None:
    draw = random.Random(seed)
    config = _config()
    each_step = ray_wrappers.RayPrometheusStatLogger(config, [0])
    sequence = [_step(draw) for _ in range(40)]
    for stats in sequence:
        each_step.record(**stats)
    expected = values_of_metrics(sent)
    assert {key[0] for key in expected} == {"Gauge", "Counter", "Histogram"}
    assert len(expected) > 60
    sent.clear()

    buffered = BufferedStatLogger(config, [0])
    for stats in sequence:
        buffered.record(**stats)
        if draw.random() < 0.1:
            buffered_metrics.flush()
    buffered_metrics.flush()
    assert values_of_metrics(sent) == expected


async def test_ray_gets_one_update_for_many_steps_and_gauges_also_between_updates(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_metrics, "_FLUSH_PERIOD_S", 0.02)
    buffered = BufferedStatLogger(_config(), [0])
    key = "Counter", "vllm_generation_tokens", ("ReplicaId", ""), ("engine", "0"), ("model_name", "m")
    running = "Gauge", "vllm_num_requests_running", *key[2:]
    for so_far in ([50], [50, 50]):
        for number in range(50):
            stats = IterationStats()
            stats.num_generation_tokens = 1
            buffered.record(SchedulerStats(num_running_reqs=number), stats)
        assert sent[key] == so_far[1:]
        sent[running].clear()
        async with asyncio.timeout(20):
            while len(sent[running]) < 3:  # the engine is idle
                await asyncio.sleep(0.01)
        assert sent[key] == so_far
        assert set(sent[running]) == {49}


async def test_an_error_of_ray_does_not_end_the_updates(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_metrics, "_FLUSH_PERIOD_S", 0.01)
    buffered = BufferedStatLogger(_config(), [0])
    with monkeypatch.context() as broken:
        broken.setattr(
            buffered_metrics._Pending, "report", MagicMock(side_effect=RuntimeError("Ray is away"))
        )
        buffered.record(SchedulerStats(num_running_reqs=1), None)
        assert buffered._flushing is not None
        with pytest.raises(RuntimeError, match="Ray is away"):
            await buffered._flushing
    buffered.record(SchedulerStats(num_running_reqs=2), None)
    async with asyncio.timeout(20):
        while [2] not in sent.values():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("rank", [0, 1])
async def test_awaited_metrics_are_sent_with_their_step(sent: Sent, rank: int) -> None:
    buffered = BufferedStatLogger(_config(), [0, 1])
    waiting = asyncio.create_task(MEASUREMENTS.wait_for_counts("prompt"))
    await asyncio.sleep(0)
    MEASUREMENTS.take_steps(rank)
    step = {"requests": 2, "kv_tokens": 9, "active_experts": 20.0}
    step |= {"active_by_layer": [20, 20], "seconds": 0.25}
    data = {"nixl": None, "steps": [step], "prompt_steps": [], "capture_s": []}
    data |= {"kv_usage": 0.375, "prompt_counts": {"prompt": (3, "counts")}}
    buffered.record(SchedulerStats(kv_connector_stats=data), None, engine_idx=rank)
    assert not sent
    assert MEASUREMENTS.kv_usage[rank] == 0.375
    assert MEASUREMENTS.take_steps(rank).seconds == 0.25
    async with asyncio.timeout(20):
        assert await waiting == (3, "counts")


def _client(loggers: list[Any], config: Any) -> Any:
    manager = StatLoggerManager(config, [0], custom_stat_loggers=loggers)
    assert any(isinstance(one, PerEngineStatLoggerAdapter) for one in manager.stat_loggers)
    return SimpleNamespace(vllm_config=config, logger_manager=manager)


@pytest.mark.parametrize("details", [False, True])
async def test_it_replaces_rays_logger_and_the_unread_text_log(sent: Sent, details: bool) -> None:
    config = _config()
    config.observability_config.enable_logging_iteration_details = details
    other = MagicMock()
    client = _client(
        [ray_wrappers.RayPrometheusStatLogger, LoggingStatLogger, lambda *_, **__: other], config
    )
    replace_ray_logger(client, BufferedStatLogger)
    kinds = [type(one) for one in client.logger_manager.stat_loggers]
    text = [PerEngineStatLoggerAdapter] if details else []
    assert kinds == [BufferedStatLogger, *text, PerEngineStatLoggerAdapter, *text]
    sent.clear()
    client.logger_manager.record(SchedulerStats(), IterationStats())
    assert not sent
    other.record.assert_called_once()


async def test_engines_that_do_not_report_to_ray_keep_their_loggers() -> None:
    replace_ray_logger(SimpleNamespace(logger_manager=None), BufferedStatLogger)
    logger = MagicMock(spec=PrometheusStatLogger)
    client = SimpleNamespace(vllm_config=_config(), logger_manager=SimpleNamespace(stat_loggers=[logger]))
    replace_ray_logger(client, BufferedStatLogger)
    assert client.logger_manager.stat_loggers == [logger]


def test_another_vllm_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"has no StatLoggerManager\.stat_loggers"):
        replace_ray_logger(SimpleNamespace(logger_manager=object()), BufferedStatLogger)


async def test_a_stopping_engine_sends_the_remaining_metrics(sent: Sent) -> None:
    buffered = BufferedStatLogger(_config(), [0])
    sent.clear()
    buffered.record(SchedulerStats(num_running_reqs=3), None)
    of_ray = SimpleNamespace(shutdown=AsyncMock())
    await VllmEngine(SimpleNamespace(engine=of_ray), "m").stop()
    of_ray.shutdown.assert_awaited_once()
    assert [3] in sent.values()
