"""Metrics of an engine's steps in vLLM's Prometheus exporter."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import prometheus_client

from eldr_serve.engine.vllm.stats import EldrPromMetrics
from eldr_serve.metrics import COUNTER, ENGINE

STEP = {"requests": 2, "kv_tokens": 9, "active_experts": 20.0, "active_by_layer": [20, 20], "seconds": 0.25}


def test_steps_appear_in_all_metrics_of_the_table() -> None:
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in kinds}
    metrics = EldrPromMetrics(MagicMock(), types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe({"steps": [STEP] * 3, "prompt_steps": [], "capture_s": [1e-4]})
    values = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels == {"model_name": "m", "engine": "0"}
    }
    for name, metric in ENGINE.items():
        assert values[name if metric.kind == COUNTER else f"{name}_sum"] > 0
    names = {name.removesuffix("_sum") for name in values if name.startswith("eldr_")}
    assert {name for name in names if not name.endswith(("_count", "_created"))} == set(ENGINE)
    assert values["eldr_decode_steps_total"] == 3
    assert values["eldr_decode_step_experts_total"] == 60
    assert values["eldr_decode_step_requests_total"] == 6
    assert values["eldr_decode_seconds_total"] == 0.75
    assert values["eldr_decode_token_seconds_total"] == 1.5
    assert values["eldr_active_experts_count"] == 3
