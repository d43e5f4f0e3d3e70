"""Metrics of each engine, exported through vLLM's metrics, and of each engine replica."""

from __future__ import annotations

from eldr_serve.metrics.definition import COUNTER, HISTOGRAM, Metric, index_by_name

_ENGINE = ("model_name", "engine", "ReplicaId")
_STEPPED = "once a request was decoded"

ENGINE = index_by_name(
    Metric(
        "eldr_active_experts",
        HISTOGRAM,
        "experts",
        "distinct experts per decode step, mean over layers",
        _ENGINE,
        (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 512),
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_seconds",
        HISTOGRAM,
        "s",
        "time of a decode step's forward pass; on CPUs, the CPU time of its thread",
        _ENGINE,
        (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0),
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_batch_size",
        HISTOGRAM,
        "requests",
        "requests of a decode step",
        _ENGINE,
        (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512),
        only=_STEPPED,
    ),
    Metric(
        "eldr_capture_seconds",
        HISTOGRAM,
        "s",
        "time per step spent on counting experts",
        _ENGINE,
        (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
        only=_STEPPED,
    ),
    # The same quantities as exact sums, since Ray exports only the buckets of a histogram.
    Metric(
        "eldr_decode_steps_total",
        COUNTER,
        "steps",
        "decode steps",
        _ENGINE,
        status="decode_totals.steps",
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_experts_total",
        COUNTER,
        "experts",
        "sum over decode steps of the active experts, mean over layers",
        _ENGINE,
        status="decode_totals.active_experts",
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_requests_total",
        COUNTER,
        "requests",
        "sum of the requests of all decode steps",
        _ENGINE,
        status="decode_totals.requests",
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_seconds_total",
        COUNTER,
        "s",
        "sum of eldr_decode_step_seconds",
        _ENGINE,
        status="decode_totals.seconds",
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_token_seconds_total",
        COUNTER,
        "s",
        "sum over decode steps of time times requests: the total time that tokens waited",
        _ENGINE,
        status="decode_totals.token_seconds",
        only=_STEPPED,
    ),
)

REPLICA = index_by_name(
    Metric(
        "eldr_engine_lost_total",
        COUNTER,
        "times",
        "the engine core died, was stopped, or did not answer for `path.stall_timeout_s`",
        ("role",),
    )
)
