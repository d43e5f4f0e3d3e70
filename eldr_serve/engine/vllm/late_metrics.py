"""vLLM's metrics and ours in Ray, told once a second what came with the steps of the engine.

To tell Ray takes some microseconds a value, and vLLM has about forty values for a step. Gauges are told while
the engine is idle too: Ray drops one that it was not told for two of its reports.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from eldr_serve.engine.vllm.compat.stat_loggers import (
    RayCounterWrapper,
    RayGaugeWrapper,
    RayHistogramWrapper,
    RayKVConnectorProm,
    RayPerfMetricsProm,
    RayPrometheusMetric,
    RayPrometheusStatLogger,
    RaySpecDecodingProm,
)

_EVERY_S = 1.0  # between two times that Ray is told


class _Pending:
    """What this process's counters and histograms hold and Ray was not told yet, and its gauges' values."""

    def __init__(self, values: dict[LateGauge, float] | None = None) -> None:
        self.values = dict(values or {})
        self.sums: defaultdict[LateCounter, float] = defaultdict(int)
        self.observed: defaultdict[LateHistogram, list[float]] = defaultdict(list)

    def tell(self) -> None:
        """Tell Ray; in any thread, once it is not written to any more."""
        for gauge, value in self.values.items():
            gauge.tell(value)
        for counter, total in self.sums.items():
            counter.tell(total)
        for histogram, observed in self.observed.items():
            for value in observed:
                histogram.tell(value)


class _Labelled(RayPrometheusMetric):
    """Makes each labelled metric once: vLLM asks for some in every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made: dict[tuple[str, ...], Any] = {}

    def labels(self, *labels: Any, **named: Any) -> Any:
        """As of prometheus_client's metrics."""
        key = (*map(str, labels), *(f"{name}={value}" for name, value in named.items()))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = super().labels(*labels, **named)
        return made


class LateGauge(_Labelled, RayGaugeWrapper):
    """The newest value counts."""

    def set(self, value: float) -> None:
        """As of prometheus_client's Gauge."""
        _pending.values[self] = value

    def tell(self, value: float) -> None:
        """Tell Ray."""
        super().set(value)


class LateCounter(_Labelled, RayCounterWrapper):
    """Values are added up."""

    def inc(self, value: float = 1.0) -> None:
        """As of prometheus_client's Counter."""
        if value:
            _pending.sums[self] += value

    def tell(self, value: float) -> None:
        """Tell Ray."""
        super().inc(value)


class LateHistogram(_Labelled, RayHistogramWrapper):
    """All observations are kept: Ray has no way to take several at once."""

    def observe(self, value: float) -> None:
        """As of prometheus_client's Histogram."""
        _pending.observed[self].append(value)

    def tell(self, value: float) -> None:
        """Tell Ray."""
        super().observe(value)


class _LateSpecDecoding(RaySpecDecodingProm):
    _counter_cls = LateCounter


class _LateKVConnector(RayKVConnectorProm):
    _gauge_cls = LateGauge
    _counter_cls = LateCounter
    _histogram_cls = LateHistogram


class _LatePerf(RayPerfMetricsProm):
    _counter_cls = LateCounter


class LateStatLogger(RayPrometheusStatLogger):
    """vLLM's logger of Ray's metrics; to be made and called in the engine's event loop."""

    _gauge_cls = LateGauge
    _counter_cls = LateCounter
    _histogram_cls = LateHistogram
    _spec_decoding_cls = _LateSpecDecoding
    _kv_connector_cls = _LateKVConnector
    _perf_metrics_cls = _LatePerf

    _telling: asyncio.Task[None] | None = None

    def record(self, *args: Any, **kwargs: Any) -> None:
        """As of vLLM's stat loggers."""
        super().record(*args, **kwargs)
        self._tell_from_now_on()

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """As of vLLM's stat loggers."""
        super().record_sleep_state(sleep, level)
        self._tell_from_now_on()

    def record_admission_rejection(self, reason: str) -> None:
        """As of vLLM's stat loggers."""
        super().record_admission_rejection(reason)
        self._tell_from_now_on()

    def _tell_from_now_on(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(_tell_each_second())


async def _tell_each_second() -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        await asyncio.to_thread(_taken().tell)


def tell_now() -> None:
    """Tell Ray what it was not told yet: the engine ends."""
    _taken().tell()


def _taken() -> _Pending:
    global _pending
    taken, _pending = _pending, _Pending(_pending.values)
    return taken


_pending = _Pending()
