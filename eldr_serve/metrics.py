"""Definitions of all metrics; the code creates metrics from these tables, and the reference lists them.

Ray exports each name with the prefix `ray_`. Following Prometheus' conventions, counters end in `_total`, and
units are seconds, tokens, requests or ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PREFIX = "ray_"  # prefix of every metric that Ray exports

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        kind: COUNTER, GAUGE or HISTOGRAM.
        unit: unit of the values.
        about: description, one phrase.
        labels: labels of the metric; Ray adds more, such as the node and the process (`WorkerId`).
        bounds: upper bounds of a histogram's buckets.
        status: path of the same value in `GET /eldr/status`.
        only: condition under which there are samples; empty if always.
    """

    name: str
    kind: str
    unit: str
    about: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    status: str = ""
    only: str = ""


def _by_name(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


# -- counters of the router, by their keys under `counters` in the status ------------------------------

_COUNTED = {
    # outcomes of requests
    "placed": ("requests", "leases of a decode worker"),
    "best_worker": ("requests", "placed on the worker with the most similar centroid"),
    "rerouted": ("requests", "placed again after a failure"),
    "queued": ("requests", "waited in the decode queue"),
    "queue_expired": ("requests", "refused (503) because no decode worker became free in time"),
    "placed_by_client": ("requests", "placed by their ingress and reported to the router later"),
    "placed_by_own_load": ("requests", "placed by an ingress by its own load because the router was lost"),
    "prefills": ("calls", "prefill calls that succeeded"),
    "prefill_tokens": ("tokens", "prompt tokens of requests on whole engines"),
    "prefill_tokens_cached": (
        "tokens",
        "of these, tokens expected in the worker's prefix cache",
    ),
    "prefill_retries": ("calls", "prefill calls that failed and were retried"),
    "whole_without_prefill": (
        "requests",
        "run entirely on a decode engine: no prefill engine was reachable",
    ),
    "resumed": ("answers", "continued on another engine after theirs was lost"),
    "streams_lost": ("streams", "ended with `engine_lost`"),
    "slow_clients": ("streams", "cancelled because their client did not read"),
    "set_aside": ("times", "an ingress ejected a replica that failed repeatedly"),
    # what was refused before prefill
    "refused_prefill_full": ("requests", "refused (503) because all prefill engines were full"),
    "refused_prefill_backlog": ("requests", "refused (503) because the prefill queue was too long"),
    "refused_decode_backlog": ("requests", "refused (503) because too many waited for a slot of an engine"),
    "refused_overload": ("requests", "refused (429) by the concurrency limit"),
    "refused_limits": ("requests", "refused (429) because a tenant had used up a limit"),
    # expert counts and predictions
    "counts_missing": ("requests", "placed without expert counts, measured or predicted"),
    "counts_predicted": ("requests", "placed with predicted expert counts"),
    "counts_measured": ("requests", "expert counts measured after the placement by a prediction"),
    "predictor_failures": ("predictions", "unusable predictions of a policy's predictor"),
    # the router itself
    "policy_errors": ("requests", "placed by load because the policy raised an error"),
    "policy_changes": ("changes", "changes of the policy"),
    "table_swaps": ("changes", "changes of the routing table"),
    "refits": ("changes", "changes to a table that the signature pool refitted"),
    "tables_refused": ("tables", "tables of the signature pool that were not swapped in"),
    "predictor_swaps": ("changes", "changes of the signature predictor"),
    "shadow_errors": ("errors", "errors of the shadow, each of which switched it off"),
    "router_lost": ("times", "an ingress lost the router"),
    "settings_restored": ("times", "the router restored newer settings from an ingress"),
    "leases_restored": ("requests", "leases that the router restored from an ingress"),
    "leases_of_lost_clients": ("requests", "leases that ended because their ingress was lost"),
    "queued_of_lost_clients": ("requests", "removed from the decode queue because their ingress was lost"),
}
_OTHERWISE_NAMED = {"rerouted": "eldr_reroute_total"}

COUNTED = {
    key: Metric(
        _OTHERWISE_NAMED.get(key, f"eldr_{key}_total"), COUNTER, unit, about, ("policy",),
        status=f"counters.{key}",
    )
    for key, (unit, about) in _COUNTED.items()
}  # fmt: skip
# `reason:NAME` in the status, one key per reason.
BY_REASON = Metric(
    "eldr_placed_by_reason_total", COUNTER, "requests", "leases by the rule that decided",
    ("policy", "reason"), status="counters.reason:NAME", only="once a request was placed",
)  # fmt: skip

# -- other metrics of the router ------------------------------------------------------------------------

_ANSWERED = "once a stream has ended"
_QUEUED = "policies with a decode queue, once a request has waited"
_PREDICTOR = "with a signature predictor"
_POOL = "with a signature pool"
_SHADOW = "with a shadow that has priced tokens"
_WORKER = ("worker", "policy")
_SHADOWED = ("policy", "shadow")

ROUTER = _by_name(
    *COUNTED.values(),
    BY_REASON,
    Metric(
        "eldr_route_seconds", HISTOGRAM, "s", "time to place one batch of requests in the router",
        ("policy",), (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        only="once a request was placed",
    ),
    Metric(
        "eldr_candidates", HISTOGRAM, "workers", "number of candidates of the policy", ("policy",),
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), only="once a request was placed",
    ),
    Metric(
        "eldr_decode_queue_wait_seconds", HISTOGRAM, "s", "wait in the decode queue until a worker is leased",
        ("policy",), (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30), only=_QUEUED,
    ),
    Metric(
        "eldr_ttft_seconds", HISTOGRAM, "s", "time from a stream's arrival to its first chunk", ("policy",),
        (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60), only=_ANSWERED,
    ),
    Metric(
        "eldr_tpot_seconds", HISTOGRAM, "s", "mean time between tokens of a stream", ("policy",),
        (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1), only=_ANSWERED,
    ),
    Metric(
        "eldr_decode_in_flight", GAUGE, "requests", "requests that hold a lease of the worker", _WORKER,
        status="workers.in_flight",
    ),
    Metric(
        "eldr_decode_kv_tokens", GAUGE, "tokens", "prompt and generated tokens of these requests", _WORKER,
        status="workers.kv_tokens",
    ),
    Metric("eldr_leases", GAUGE, "requests", "leases of all workers", ("policy",), status="leases"),
    Metric("eldr_clients", GAUGE, "processes", "clients of the router", ("policy",), status="clients"),
    Metric(
        "eldr_decode_queue_size", GAUGE, "requests", "prefilled requests that wait for a worker", ("policy",),
        status="decode_queue.size",
    ),
    Metric(
        "eldr_decode_queue_oldest_wait_seconds", GAUGE, "s", "longest wait among them", ("policy",),
        status="decode_queue.oldest_wait_s",
    ),
    Metric(
        "eldr_table_version", GAUGE, "number", "version of the live routing table, 0 if none", ("policy",),
        status="table.version",
    ),
    Metric(
        "eldr_refit_advised", GAUGE, "0 or 1", "the table was fitted for another number of workers",
        ("policy",), status="table.refit_advised", only="with a routing table",
    ),
    Metric(
        "eldr_signature_samples", GAUGE, "requests", "requests in the signature pool",
        status="signatures.samples", only=_POOL,
    ),
    Metric(
        "eldr_signature_share_ratio", GAUGE, "ratio", "share of requests that are sampled",
        status="signatures.share", only=_POOL,
    ),
    Metric(
        "eldr_step_cost_error_ratio", GAUGE, "ratio", "relative error of the fitted step cost", ("policy",),
        status="step_cost.relative_error", only="once a step cost is fitted",
    ),
    Metric(
        "eldr_predictor_gain", GAUGE, "ratio", "1 - squared error of predictions / that of the mean",
        status="predictor.gain", only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_cosine", GAUGE, "cosine", "cosine of predicted and true deviations from the mean",
        status="predictor.cosine", only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_on", GAUGE, "processes", "processes whose predictor is better than the mean",
        status="predictor.on", only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_prompts", GAUGE, "prompts", "prompts on which predictions were evaluated",
        status="predictor.prompts", only=_PREDICTOR,
    ),
    Metric(
        "eldr_shadow_change_ratio", GAUGE, "ratio",
        "relative change of the time per token, live policy against shadow; below 0 the live one is faster",
        _SHADOWED, status="comparison.now.change_pct", only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_change_low_ratio", GAUGE, "ratio", "lower end of its 95 % interval", _SHADOWED,
        status="comparison.now.low_pct", only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_change_high_ratio", GAUGE, "ratio", "upper end of its 95 % interval", _SHADOWED,
        status="comparison.now.high_pct", only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_live_seconds", GAUGE, "s",
        "mean decode step time of a token under the live policy, by the fitted step cost",
        _SHADOWED, status="comparison.now.live_ms", only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_measured_seconds", GAUGE, "s", "the same, measured by the engines", _SHADOWED,
        status="comparison.now.measured_ms", only=_SHADOW,
    ),
)  # fmt: skip

# -- metrics of each ingress replica, by their keys under `ingress` in the status ------------------------

_SPLIT = "with prefill engines"

OWN = {
    "ready": Metric("eldr_ingress_ready", GAUGE, "0 or 1", "all engines are up and warm"),
    "router_away": Metric("eldr_ingress_router_away", GAUGE, "0 or 1", "the router does not answer"),
    "in_flight": Metric("eldr_ingress_in_flight", GAUGE, "requests", "requests admitted that have not ended"),
    "waiting": Metric("eldr_ingress_waiting", GAUGE, "requests", "requests that wait for admission"),
    "leases": Metric("eldr_ingress_leases", GAUGE, "requests", "requests that hold a decode worker"),
    "warm_pairs": Metric("eldr_ingress_warm_pairs", GAUGE, "pairs", "engine pairs that exchanged blocks"),
    "prefill_in_flight": Metric(
        "eldr_ingress_prefill_in_flight", GAUGE, "calls", "open calls to the prefill replica", ("worker",),
        only=_SPLIT,
    ),
    "prefill_oldest_s": Metric(
        "eldr_prefill_oldest_seconds", GAUGE, "s", "age of the oldest open call to the prefill replica",
        ("worker",), only=_SPLIT,
    ),
    "prefill_wait_s": Metric(
        "eldr_prefill_wait_seconds", GAUGE, "s", "predicted wait of a prompt that arrives now at the replica",
        ("worker",),
    ),
    "prefill_kv_usage": Metric(
        "eldr_prefill_kv_usage_ratio", GAUGE, "ratio", "share of the prefill replica's KV blocks in use",
        ("worker",), only=_SPLIT,
    ),
    "decode_kv_usage": Metric(
        "eldr_decode_kv_usage_ratio", GAUGE, "ratio", "share of the decode replica's KV blocks in use",
        ("worker",),
    ),
    "stages": Metric(
        "eldr_stage_seconds", GAUGE, "s", "time of a stage, newest 256 requests", ("stage", "quantile"),
        only="with prefill engines, once a request was served",
    ),
}  # fmt: skip
OWN = {key: replace(metric, status=f"ingress.{key}") for key, metric in OWN.items()}

_MOVABLE = "with expert-parallel decode engines on CPU"

# Metrics of each decode replica, by their keys under `ingress.experts.REPLICA`.
EXPERTS = {
    "slices_left": Metric(
        "eldr_expert_slices_left", GAUGE, "slices", "remaining slices of a swap of the expert placement",
        ("worker",), only=_MOVABLE,
    ),
    "experts_moved": Metric(
        "eldr_experts_moved", GAUGE, "experts", "changes of slots since the replica's start", ("worker",),
        only=_MOVABLE,
    ),
    "replica_bytes": Metric(
        "eldr_expert_replica_bytes", GAUGE, "bytes", "size of slots for replicas of experts, all ranks",
        ("worker",), only=_MOVABLE,
    ),
}  # fmt: skip
EXPERTS = {key: replace(metric, status=f"ingress.experts.REPLICA.{key}") for key, metric in EXPERTS.items()}
INGRESS = _by_name(*OWN.values(), *EXPERTS.values())

# -- metrics of each engine, exported through vLLM's metrics ----------------------------------------------

_ENGINE = ("model_name", "engine", "ReplicaId")
_STEPPED = "once a request was decoded"

ENGINE = _by_name(
    Metric(
        "eldr_active_experts", HISTOGRAM, "experts", "distinct experts per decode step, mean over layers",
        _ENGINE,
        (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 512), only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_seconds", HISTOGRAM, "s",
        "time of a decode step's forward pass in the worker; on CPU that of its thread", _ENGINE,
        (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0),
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_batch_size", HISTOGRAM, "requests", "requests of a decode step", _ENGINE,
        (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512), only=_STEPPED,
    ),
    Metric(
        "eldr_capture_seconds", HISTOGRAM, "s", "time per step spent on counting experts", _ENGINE,
        (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2), only=_STEPPED,
    ),
    # The same as exact sums, since Ray exports only the buckets of a histogram.
    Metric(
        "eldr_decode_steps_total", COUNTER, "steps", "decode steps", _ENGINE, status="decode_totals.steps",
        only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_experts_total", COUNTER, "experts",
        "sum over decode steps of the active experts, mean over layers", _ENGINE,
        status="decode_totals.active_experts", only=_STEPPED,
    ),
    Metric(
        "eldr_decode_step_requests_total", COUNTER, "requests", "sum over decode steps of their requests",
        _ENGINE, status="decode_totals.requests", only=_STEPPED,
    ),
    Metric(
        "eldr_decode_seconds_total", COUNTER, "s", "sum of eldr_decode_step_seconds", _ENGINE,
        status="decode_totals.seconds", only=_STEPPED,
    ),
    Metric(
        "eldr_decode_token_seconds_total", COUNTER, "s",
        "sum over decode steps of time times requests: the total time that tokens waited", _ENGINE,
        status="decode_totals.token_seconds", only=_STEPPED,
    ),
)  # fmt: skip

# -- metrics of each process, by their keys under `loops.ROLE` in the status ------------------------------

STALL_S = 0.5  # longest time that an event loop may be blocked, s

_ROLE = ("role",)  # router, ingress, prefill or decode; the status has the first two

LOOP = {
    "stalls": Metric(
        "eldr_loop_stalls_total", COUNTER, "times", "the event loop was blocked for 0.5 s or longer", _ROLE
    ),
    "longest_stall_s": Metric(
        "eldr_loop_longest_stall_seconds", GAUGE, "s", "longest time that the event loop was blocked", _ROLE
    ),
    "tasks": Metric("eldr_loop_tasks", GAUGE, "tasks", "tasks of the event loop", _ROLE),
}
LOOP = {key: replace(metric, status=f"loops.ROLE.{key}") for key, metric in LOOP.items()}
PROCESS = _by_name(*LOOP.values())

# -- metrics of each engine replica ----------------------------------------------------------------------

REPLICA = _by_name(
    Metric(
        "eldr_engine_lost_total", COUNTER, "times",
        "the engine core died, was stopped, or did not answer for `path.stall_limit_s`", ("role",),
    )
)  # fmt: skip

METRICS = ROUTER | INGRESS | PROCESS | REPLICA | ENGINE
