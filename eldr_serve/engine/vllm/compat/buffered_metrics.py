"""vLLM's and eldr_serve's metrics of a replica, reported to Ray once per second instead of in each step.

A report to Ray takes some microseconds per value, and vLLM has about forty values per step. Gauges are also
reported while the engine is idle, since Ray drops a gauge that was not set during two of its exports.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import vllm

from eldr_serve.engine.vllm.compat.checked import SUPPORTED_VLLM, UnsupportedEngineError, internal_imports

with internal_imports():
    from vllm.v1.metrics.loggers import LoggingStatLogger, PerEngineStatLoggerAdapter
    from vllm.v1.metrics.ray_wrappers import (
        RayCounterWrapper,
        RayGaugeWrapper,
        RayHistogramWrapper,
        RayKVConnectorProm,
        RayPerfMetricsProm,
        RayPrometheusMetric,
        RayPrometheusStatLogger,
        RaySpecDecodingProm,
    )

_FLUSH_PERIOD_S = 1.0


class _Pending:
    """The values of this process's metrics that are not yet reported to Ray.

    Attributes:
        values: newest values of gauges.
        sums: increments of counters.
        observations: observations of histograms.
    """

    def __init__(self, values: dict[BufferedGauge, float] | None = None) -> None:
        self.values = dict(values or {})
        self.sums: defaultdict[BufferedCounter, float] = defaultdict(int)
        self.observations: defaultdict[BufferedHistogram, list[float]] = defaultdict(list)

    def report(self) -> None:
        """Report all values to Ray, in any thread; nothing may be added afterwards."""
        for gauge, value in self.values.items():
            gauge.report(value)
        for counter, total in self.sums.items():
            counter.report(total)
        for histogram, values in self.observations.items():
            for value in values:
                histogram.report(value)


class _Labelled(RayPrometheusMetric):
    """A metric that caches its labelled children, since vLLM requests some in every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._children: dict[tuple[str, ...], Any] = {}

    def labels(self, *labels: Any, **named_labels: Any) -> Any:
        """Return the child with these labels, as metrics of prometheus_client do."""
        key = (*map(str, labels), *(f"{name}={value}" for name, value in named_labels.items()))
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = super().labels(*labels, **named_labels)
        return child


class BufferedGauge(_Labelled, RayGaugeWrapper):
    """A gauge that reports its newest value."""

    def set(self, value: float) -> None:
        """Set the value, as prometheus_client's Gauge does."""
        _pending.values[self] = value

    def report(self, value: float) -> None:
        """Report to Ray."""
        super().set(value)


class BufferedCounter(_Labelled, RayCounterWrapper):
    """A counter that reports the sum of its increments."""

    def inc(self, value: float = 1.0) -> None:
        """Increment the counter, as prometheus_client's Counter does."""
        if value:
            _pending.sums[self] += value

    def report(self, value: float) -> None:
        """Report to Ray."""
        super().inc(value)


class BufferedHistogram(_Labelled, RayHistogramWrapper):
    """A histogram that reports each observation: Ray cannot receive several at once."""

    def observe(self, value: float) -> None:
        """Observe a value, as prometheus_client's Histogram does."""
        _pending.observations[self].append(value)

    def report(self, value: float) -> None:
        """Report to Ray."""
        super().observe(value)


class _BufferedSpecDecoding(RaySpecDecodingProm):
    _counter_cls = BufferedCounter


class _BufferedKVConnector(RayKVConnectorProm):
    _gauge_cls = BufferedGauge
    _counter_cls = BufferedCounter
    _histogram_cls = BufferedHistogram


class _BufferedPerf(RayPerfMetricsProm):
    _counter_cls = BufferedCounter


class BufferedStatLogger(RayPrometheusStatLogger):
    """vLLM's logger for Ray's metrics; create and call it in the engine's event loop."""

    _gauge_cls = BufferedGauge
    _counter_cls = BufferedCounter
    _histogram_cls = BufferedHistogram
    _spec_decoding_cls = _BufferedSpecDecoding
    _kv_connector_cls = _BufferedKVConnector
    _perf_metrics_cls = _BufferedPerf

    _flushing: asyncio.Task[None] | None = None

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Record a step's statistics in the buffers, and flush these soon."""
        super().record(*args, **kwargs)
        self._start_flushing()

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Record that the engine sleeps or wakes, and flush the buffers soon."""
        super().record_sleep_state(sleep, level)
        self._start_flushing()

    def record_admission_rejection(self, reason: str) -> None:
        """Record a refused request, and flush the buffers soon."""
        super().record_admission_rejection(reason)
        self._start_flushing()

    def _start_flushing(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(_flush_periodically())


async def _flush_periodically() -> None:
    while True:
        await asyncio.sleep(_FLUSH_PERIOD_S)
        await asyncio.to_thread(_take_pending().report)


def flush() -> None:
    """Report all pending values to Ray, before the engine ends."""
    _take_pending().report()


def _take_pending() -> _Pending:
    global _pending
    pending, _pending = _pending, _Pending(_pending.values)
    return pending


_pending = _Pending()


def replace_ray_logger(client: Any, kind: type[RayPrometheusStatLogger]) -> None:
    """Replace the Ray logger of a started engine with a `kind`, and remove its text logger.

    Ray hard-codes the class of its logger. The text logger sums up statistics for a line that a replica does
    not use, so this logger is kept only if it writes a line for each step. An engine without a Ray logger
    does not change.

    Args:
        client: vLLM's client of its engine core.
        kind: class of the new logger.

    Raises:
        UnsupportedEngineError: vLLM's loggers are not where this version has them.
    """
    manager = client.logger_manager
    if manager is None:
        return
    loggers = getattr(manager, "stat_loggers", None)
    if not isinstance(loggers, list):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} has no StatLoggerManager.stat_loggers, which eldr-serve replaces; "
            f"it was checked on {SUPPORTED_VLLM}"
        )
    config = client.vllm_config
    keeps_text = config.observability_config.enable_logging_iteration_details
    for index, logger in reversed(list(enumerate(loggers))):
        if type(logger) is RayPrometheusStatLogger:
            loggers[index] = kind(config, logger.engine_indexes)
        elif _is_text(logger) and not keeps_text:
            del loggers[index]


def _is_text(logger: Any) -> bool:
    return isinstance(logger, PerEngineStatLoggerAdapter) and all(
        type(inner) is LoggingStatLogger for inner in logger.per_engine_stat_loggers.values()
    )
