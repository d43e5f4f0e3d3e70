"""Each count of the status is a metric with the right labels and values."""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray._private.telemetry.open_telemetry_metric_recorder import OpenTelemetryMetricRecorder

from eldr_serve.ingress.metrics_export import IngressMetrics
from eldr_serve.metrics import (
    COUNTER,
    COUNTERS,
    COUNTERS_BY_NAME,
    ENGINE,
    EXPERTS,
    GAUGE,
    HISTOGRAM,
    INGRESS,
    INGRESS_STATUS,
    LATENCY_PREDICTION,
    LOOP,
    METRICS,
    PREFIX,
    PROCESS,
    REPLICA,
    ROUTER,
    IngressEvent,
    RouterEvent,
)
from eldr_serve.monitoring import ray_metrics
from eldr_serve.monitoring.loop_watch import LoopMetrics
from eldr_serve.replicas.engine_watch import ReplicaMetrics
from eldr_serve.router.actor import actor_name
from eldr_serve.router.metrics_export import RouterMetrics
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import IngressReport, NamedPolicy, StreamLatencies
from tests.support.fake_router import place, request, router_state
from tests.support.ingress_app import COMPLETIONS, HELLO, running_app
from tests.support.shipped import ROOT


class FakeMetric:
    """A stand-in for a Ray metric, with the same checks of labels and values."""

    def __init__(self, name: str, about: str, *more: Any) -> None:
        self.name = name
        self.label_keys = more[-1]
        self.default_labels: dict[str, str] = {}
        self.samples: dict[tuple[tuple[str, str], ...], list[float]] = {}

    def set_default_tags(self, labels: dict[str, str]) -> "FakeMetric":
        self.default_labels = labels
        return self

    def _take(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert isinstance(value, int | float)
        assert set(tags or {}) == set(METRICS[self.name].labels)
        self.samples.setdefault(tuple(sorted((tags or {}).items())), []).append(value)

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0  # otherwise Ray raises an error
        self._take(value, tags)

    set = observe = _take


@pytest.fixture
def fake_metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeMetric]:
    """Return the metrics by name as they are created."""
    metrics: dict[str, FakeMetric] = {}

    def factory(kind: str) -> Any:
        def create(name: str, *args: Any) -> FakeMetric:
            assert METRICS[name].kind == kind
            return metrics.setdefault(name, FakeMetric(name, *args))

        return create

    for kind, name in ((COUNTER, "Counter"), (GAUGE, "Gauge"), (HISTOGRAM, "Histogram")):
        monkeypatch.setattr(ray_metrics, name, factory(kind))
    return metrics


def test_each_event_is_counted() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "eldr_serve").rglob("*.py"))
    counted_names = re.findall(r"\b(?:Ingress|Router)Event\.([A-Z_]+)\b", sources)
    assert set(counted_names) == {*IngressEvent.__members__, *RouterEvent.__members__}
    assert {*IngressEvent, *RouterEvent} == set(COUNTERS)


async def test_each_status_key_of_the_ingress_has_a_metric() -> None:
    async with running_app() as app:
        await app.post(COMPLETIONS, HELLO)
        status = await app.status()
    assert set(status["ingress"]) == set(INGRESS_STATUS) | {"experts", "objectives"}
    assert {key for entry in status["ingress"]["objectives"].values() for key in entry} == set(
        LATENCY_PREDICTION
    )
    assert set(status["loops"]["ingress"]) == set(LOOP)


def test_metric_names_follow_prometheus_conventions() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"eldr_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == COUNTER)
        assert ("_seconds" in metric.name) == (metric.unit == "s")
        assert metric.about
        assert not re.search(r"\b(these|those|the same)\b", metric.about)  # Prometheus shows each alone
        assert list(metric.bounds) == sorted(metric.bounds)
        assert bool(metric.bounds) == (metric.kind == HISTOGRAM)
    assert len(METRICS) == len(ROUTER) + len(INGRESS) + len(PROCESS) + len(REPLICA) + len(ENGINE)


def test_counters_begin_near_zero_and_follow_the_status(fake_metrics: dict[str, FakeMetric]) -> None:
    state, metrics = router_state(policy="shortest-queue"), RouterMetrics()
    metrics.export(state)
    policy = (("policy", "shortest-queue"),)
    for metric in COUNTERS.values():
        (begin,) = fake_metrics[metric.name].samples[policy]
        assert begin + 1 == 1
    place(state, request("a"))
    events = dict.fromkeys(COUNTERS, 2) | {
        "failed_work:the export": 3,
        "of_newer_code": 1,
        "of_newer:code": 1,
    }
    state.ingresses.add_report("c", IngressReport(events))
    for _ in range(2):
        metrics.export(state)
    counters = router_status(state)["counters"]
    for key, metric in COUNTERS.items():
        if key != "predictor_failures":  # the policy counts these itself
            assert sum(fake_metrics[metric.name].samples[policy]) == counters[key] >= 2
    assert fake_metrics[COUNTERS_BY_NAME["failed_work"].name].samples == {
        (*policy, ("work", "the export")): [3]
    }
    (reason,) = fake_metrics[COUNTERS_BY_NAME["reason"].name].samples
    assert dict(reason)["policy"] == "shortest-queue"
    assert counters[f"reason:{dict(reason)['reason']}"] == 1
    state.live_settings.set_policy("random", {})
    metrics.export(state)
    other = fake_metrics["eldr_policy_changes_total"].samples[(("policy", "random"),)]
    assert sum(other) == 1


def test_the_router_exports_all_its_metrics(fake_metrics: dict[str, FakeMetric]) -> None:
    state, metrics = router_state(policy="shortest-queue", shadow=NamedPolicy("random")), RouterMetrics()
    (lease,) = place(state, request("a"))
    metrics.record_placement(state, 1e-4)
    metrics.record_leases(state, [lease])
    metrics.record_wait(state, lease)
    metrics.record_streams(state, [StreamLatencies(0.5, None), StreamLatencies(0.5, 0.1)])
    state.ingresses.add_report("c", IngressReport({"failed_work:the export": 1}))
    status = router_status(state) | {
        "step_cost": {"steps": 1.0, "relative_error": 0.1},
        "predictor": {"version": 1, "ingresses": 1, "prompts": 9, "on": 1, "cosine": 0.5, "gain": 0.4},
    }
    status["comparison"]["now"] |= {
        "change_pct": -10.0,
        "low_pct": -12.0,
        "high_pct": -8.0,
        "live_ms": 9.0,
        "measured_ms": 10.0,
    }
    with patch("eldr_serve.router.metrics_export.router_status", lambda state: status):
        metrics.export(state, {"samples": 9, "share": 0.5})
    assert {name for name, metric in fake_metrics.items() if metric.samples} == set(ROUTER)
    assert fake_metrics["eldr_tpot_seconds"].samples == {(("policy", "shortest-queue"),): [0.1]}
    shadow = (("policy", "shortest-queue"), ("shadow", "random"))
    assert fake_metrics["eldr_shadow_change_low_ratio"].samples == {shadow: [-0.12]}
    assert fake_metrics["eldr_shadow_measured_seconds"].samples == {shadow: [0.01]}
    assert fake_metrics["eldr_decode_in_flight"].samples.keys() == {
        (("policy", "shortest-queue"), ("worker", f"r{number}")) for number in range(3)
    }


async def test_an_ingress_exports_all_its_metrics(fake_metrics: dict[str, FakeMetric]) -> None:
    metrics = IngressMetrics()
    async with running_app() as app:
        app.ingress._services.stage_latencies.on_recorded = metrics.observe_stage
        await app.post(COMPLETIONS, HELLO)
        own = (await app.status())["ingress"]
    experts = {"slices_left": 2, "experts_moved": 30, "replica_bytes": 4096, "placement": "0123456789ab"}
    metrics.export(
        own | {"prefill_kv_usage": {"r0": 0.25}, "decode_kv_usage": {"r0": 0}, "experts": {"r1": experts}}
    )
    assert {name for name, metric in fake_metrics.items() if metric.samples} == set(INGRESS)
    assert fake_metrics["eldr_prefill_kv_usage_ratio"].samples == {(("worker", "r0"),): [0.25]}
    for key, metric in EXPERTS.items():
        assert fake_metrics[metric.name].samples == {(("worker", "r1"),): [experts[key]]}
    stages = fake_metrics["eldr_stage_seconds"].samples
    assert stages.keys() == {(("stage", name),) for name in own["stages"]}
    (prefill_s,) = stages[(("stage", "prefill"),)]
    assert own["stages"]["prefill"]["p50_ms"] == pytest.approx(1000 * prefill_s, abs=1e-3)
    for metric in LATENCY_PREDICTION.values():
        assert set(fake_metrics[metric.name].samples) == {(("latency", "ttft"),), (("latency", "tpot"),)}
    totals = dict.fromkeys(LATENCY_PREDICTION, 0.0) | {"predicted_s": 2.5}
    for _ in range(2):  # only the increase counts
        metrics.export(
            own | {"objectives": {"ttft": totals}, "experts": {"r1": experts | {"experts_moved": 34}}}
        )
    predicted = fake_metrics["eldr_predicted_seconds_total"].samples[(("latency", "ttft"),)]
    assert (len(predicted), sum(predicted)) == (2, 2.5)
    assert fake_metrics["eldr_experts_moved_total"].samples == {(("worker", "r1"),): [30, 4]}


def test_an_event_loop_exports_all_its_metrics(fake_metrics: dict[str, FakeMetric]) -> None:
    metrics = LoopMetrics()
    for stalls in (0, 0, 2, 3):
        metrics.export("decode", {"stalls": stalls, "longest_stall_s": stalls * 1.5, "tasks": 7})
    assert fake_metrics.keys() == PROCESS.keys()
    role = (("role", "decode"),)
    begin, *more = fake_metrics["eldr_loop_stalls_total"].samples[role]
    assert (begin + 1, more) == (1, [2, 1])
    assert fake_metrics["eldr_loop_longest_stall_seconds"].samples == {role: [0, 0, 3, 4.5]}


def test_the_counter_of_lost_engines_begins_near_zero(fake_metrics: dict[str, FakeMetric]) -> None:
    metrics = ReplicaMetrics()
    metrics.create_series("prefill")
    metrics.count_loss("prefill")
    assert fake_metrics.keys() == REPLICA.keys()
    begin, *more = fake_metrics["eldr_engine_lost_total"].samples[(("role", "prefill"),)]
    assert (begin + 1, more) == (1, [1])


@pytest.mark.parametrize(
    ("actor", "replica_of", "label"),
    [
        (actor_name("chat"), None, "chat"),
        ("SERVE_REPLICA::chat#ingress#a1b2", "chat", "chat"),
        ("a-benchmark", None, ""),
        (None, None, ""),
    ],
)
def test_metrics_have_the_application_of_their_process(
    fake_metrics: dict[str, FakeMetric],
    monkeypatch: pytest.MonkeyPatch,
    actor: str | None,
    replica_of: str | None,
    label: str,
) -> None:
    context = SimpleNamespace(get_actor_name=lambda: actor)
    monkeypatch.setattr(ray_metrics.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_metrics.ray, "get_runtime_context", lambda: context)
    if replica_of is not None:
        monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name=replica_of))
    RouterMetrics()
    assert {metric.default_labels["application"] for metric in fake_metrics.values()} == {label}
    assert {metric.label_keys[0] for metric in fake_metrics.values()} == {"application"}


def test_ray_exports_each_metric_with_its_name_and_kind() -> None:
    """This runs the code of Ray's metrics agent."""
    agent = OpenTelemetryMetricRecorder(gauge_metric_ttl_seconds=60)
    for metric in METRICS.values():
        tags = dict.fromkeys(metric.labels, "x")
        if metric.kind == COUNTER:
            agent.register_counter_metric(metric.name, metric.about)
            for value in (ray_metrics.SMALLEST, 2.0):
                agent.set_metric_value(metric.name, tags, value)
        elif metric.kind == GAUGE:
            agent.register_gauge_metric(metric.name, metric.about)
            agent.set_metric_value(metric.name, tags, 0.5)
        else:
            agent.register_histogram_metric(metric.name, metric.about, list(metric.bounds))
            agent.set_metric_value(metric.name, tags, metric.bounds[0] / 2)
    families = list(text_string_to_metric_families(generate_latest(REGISTRY).decode()))
    kinds = {sample.name: family.type for family in families for sample in family.samples}
    values = {sample.name: sample.value for family in families for sample in family.samples}
    for metric in METRICS.values():
        name = f"{PREFIX}{metric.name}{'_count' if metric.kind == HISTOGRAM else ''}"
        assert kinds[name] == metric.kind
        assert values[name] == {COUNTER: 2.0, GAUGE: 0.5, HISTOGRAM: 1.0}[metric.kind]
