"""Metrics of the router."""

from __future__ import annotations

from eldr_serve.metrics.definition import COUNTER, GAUGE, HISTOGRAM, Metric, by_name

# -- counters of the router, by their keys under `counters` in the status ------------------------------

# Unit and description of each counter.
_COUNTER_UNITS = {
    # outcomes of requests
    "placed": ("requests", "leases of a decode worker"),
    "best_worker": ("requests", "placed on the worker with the most similar centroid"),
    "rerouted": ("requests", "placed again after a failure"),
    "queued": ("requests", "waited in the decode queue"),
    "queue_expired": ("requests", "refused (503) because no decode worker became free in time"),
    "placed_by_ingress": ("requests", "placed by their ingress and reported to the router later"),
    "placed_by_local_fallback": ("requests", "placed by their ingress because the router did not answer"),
    "prefills": ("calls", "prefill calls that succeeded"),
    "prefill_tokens": ("tokens", "prompt tokens of requests on whole engines"),
    "prefill_tokens_cached": (
        "tokens",
        "of these, tokens expected in the worker's prefix cache",
    ),
    "prefix_tokens_predicted": (
        "tokens",
        "tokens expected in the worker's prefix cache, of prompts whose engine then reported the true number",
    ),
    "prefix_tokens_measured": ("tokens", "tokens of these prompts that were in the prefix cache"),
    "prefill_retries": ("calls", "prefill calls that failed and were retried"),
    "whole_without_prefill": (
        "requests",
        "run entirely on a decode engine: no prefill engine was reachable",
    ),
    "resumed": ("answers", "continued on another engine after theirs was lost"),
    "moved": ("answers", "continued on another engine because theirs leaves"),
    "streams_lost": ("streams", "ended with `engine_lost`"),
    "refused_lost_engines": ("requests", "refused (500) because engines that worked on them were lost"),
    "slow_clients": ("streams", "cancelled because their client did not read"),
    "ejected": ("times", "an ingress ejected a replica that failed repeatedly"),
    # refusals before prefill
    "refused_prefill_full": ("requests", "refused (503) because all prefill engines were full"),
    "refused_prefill_backlog": ("requests", "refused (503) because the prefill queue was too long"),
    "refused_decode_backlog": ("requests", "refused (503) because too many waited for a slot of an engine"),
    "refused_objective": ("requests", "refused (503) because they would miss their objective"),
    "refused_overload": ("requests", "refused (429) by the concurrency limit"),
    "refused_pending_bodies": ("requests", "refused (503) because all bodies were too large together"),
    "refused_limits": ("requests", "refused (429) because a tenant had used up a limit"),
    # expert counts and predictions
    "counts_missing": ("requests", "placed without expert counts, measured or predicted"),
    "counts_predicted": ("requests", "placed with predicted expert counts"),
    "counts_measured": ("requests", "expert counts measured after the placement by a prediction"),
    "predictor_failures": ("predictions", "unusable predictions of a policy's predictor"),
    # background work
    "background_failures": ("times", "background work failed, and was started again after a delay"),
    # the router itself
    "policy_errors": ("requests", "placed by load because the policy raised an error"),
    "policy_changes": ("changes", "changes of the policy"),
    "table_swaps": ("changes", "changes of the routing table"),
    "tables_discarded": ("tables", "live tables that did not fit the engines' expert counts"),
    "refits": ("changes", "changes to a table that the signature pool refitted"),
    "tables_refused": ("tables", "tables of the signature pool that were not swapped in"),
    "predictor_swaps": ("changes", "changes of the signature predictor"),
    "shadow_errors": ("errors", "errors of the shadow, each of which switched it off"),
    "router_lost": ("times", "an ingress lost the router"),
    "settings_restored": ("times", "the router restored newer settings from an ingress"),
    "leases_restored": ("requests", "leases that the router restored from an ingress"),
    "leases_of_lost_ingresses": ("requests", "leases that ended because their ingress was lost"),
    "queued_of_lost_ingresses": ("requests", "removed from the decode queue because their ingress was lost"),
}
# Names that do not follow from the key.
_OTHER_NAMES = {"rerouted": "eldr_reroute_total"}

COUNTERS = {
    key: Metric(
        _OTHER_NAMES.get(key, f"eldr_{key}_total"),
        COUNTER,
        unit,
        about,
        ("policy",),
        status=f"counters.{key}",
    )
    for key, (unit, about) in _COUNTER_UNITS.items()
}
# Counters by name, of the keys `reason:NAME` and `failed_work:NAME` under `counters` in the status.
COUNTERS_BY_NAME = {
    "reason": Metric(
        "eldr_placed_by_reason_total",
        COUNTER,
        "requests",
        "leases by the rule that decided",
        ("policy", "reason"),
        status="counters.reason:NAME",
        only="once a request was placed",
    ),
    "failed_work": Metric(
        "eldr_background_failures_by_work_total",
        COUNTER,
        "times",
        "background work of an ingress failed, by its name in the log",
        ("policy", "work"),
        status="counters.failed_work:NAME",
        only="once background work of an ingress has failed",
    ),
}

# -- other metrics of the router ------------------------------------------------------------------------

_ANSWERED = "once a stream has ended"
_QUEUED = "policies with a decode queue, once a request has waited"
_PREDICTOR = "with a signature predictor"
_POOL = "with a signature pool"
_SHADOW = "with a shadow that has priced tokens"
_WORKER = ("worker", "policy")
_SHADOWED = ("policy", "shadow")

ROUTER = by_name(
    *COUNTERS.values(),
    *COUNTERS_BY_NAME.values(),
    Metric(
        "eldr_route_seconds",
        HISTOGRAM,
        "s",
        "time to place one batch of requests in the router",
        ("policy",),
        (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        only="once a request was placed",
    ),
    Metric(
        "eldr_candidates",
        HISTOGRAM,
        "workers",
        "number of candidates of the policy",
        ("policy",),
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        only="once a request was placed",
    ),
    Metric(
        "eldr_decode_queue_wait_seconds",
        HISTOGRAM,
        "s",
        "wait in the decode queue until a worker is leased",
        ("policy",),
        (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        only=_QUEUED,
    ),
    Metric(
        "eldr_ttft_seconds",
        HISTOGRAM,
        "s",
        "time from a stream's arrival to its first chunk",
        ("policy",),
        (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60),
        only=_ANSWERED,
    ),
    Metric(
        "eldr_tpot_seconds",
        HISTOGRAM,
        "s",
        "mean time between tokens of a stream",
        ("policy",),
        (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1),
        only=_ANSWERED,
    ),
    Metric(
        "eldr_decode_in_flight",
        GAUGE,
        "requests",
        "requests that hold a lease of the worker",
        _WORKER,
        status="workers.in_flight",
    ),
    Metric(
        "eldr_decode_kv_tokens",
        GAUGE,
        "tokens",
        "prompt and generated tokens of these requests",
        _WORKER,
        status="workers.kv_tokens",
    ),
    Metric("eldr_leases", GAUGE, "requests", "leases of all workers", ("policy",), status="leases"),
    Metric("eldr_ingresses", GAUGE, "processes", "ingresses of the router", ("policy",), status="ingresses"),
    Metric(
        "eldr_decode_queue_size",
        GAUGE,
        "requests",
        "prefilled requests that wait for a worker",
        ("policy",),
        status="decode_queue.size",
    ),
    Metric(
        "eldr_decode_queue_oldest_wait_seconds",
        GAUGE,
        "s",
        "longest wait among them",
        ("policy",),
        status="decode_queue.oldest_wait_s",
    ),
    Metric(
        "eldr_table_version",
        GAUGE,
        "number",
        "version of the live routing table, 0 if none",
        ("policy",),
        status="table.version",
    ),
    Metric(
        "eldr_refit_advised",
        GAUGE,
        "0 or 1",
        "the table was fitted for another number of workers",
        ("policy",),
        status="table.refit_advised",
        only="with a routing table",
    ),
    Metric(
        "eldr_signature_samples",
        GAUGE,
        "requests",
        "requests in the signature pool",
        status="signatures.samples",
        only=_POOL,
    ),
    Metric(
        "eldr_signature_share_ratio",
        GAUGE,
        "ratio",
        "share of requests that are sampled",
        status="signatures.share",
        only=_POOL,
    ),
    Metric(
        "eldr_step_cost_error_ratio",
        GAUGE,
        "ratio",
        "relative error of the fitted step cost",
        ("policy",),
        status="step_cost.relative_error",
        only="once a step cost is fitted",
    ),
    Metric(
        "eldr_predictor_gain",
        GAUGE,
        "ratio",
        "1 - squared error of predictions / that of the mean",
        status="predictor.gain",
        only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_cosine",
        GAUGE,
        "cosine",
        "cosine of predicted and true deviations from the mean",
        status="predictor.cosine",
        only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_on",
        GAUGE,
        "processes",
        "processes whose predictor is better than the mean",
        status="predictor.on",
        only=_PREDICTOR,
    ),
    Metric(
        "eldr_predictor_prompts",
        GAUGE,
        "prompts",
        "prompts on which predictions were evaluated",
        status="predictor.prompts",
        only=_PREDICTOR,
    ),
    Metric(
        "eldr_shadow_change_ratio",
        GAUGE,
        "ratio",
        "relative change of the time per token, live policy against shadow; below 0 the live one is faster",
        _SHADOWED,
        status="comparison.now.change_pct",
        only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_change_low_ratio",
        GAUGE,
        "ratio",
        "lower end of its 95 % interval",
        _SHADOWED,
        status="comparison.now.low_pct",
        only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_change_high_ratio",
        GAUGE,
        "ratio",
        "upper end of its 95 % interval",
        _SHADOWED,
        status="comparison.now.high_pct",
        only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_live_seconds",
        GAUGE,
        "s",
        "mean decode step time of a token under the live policy, by the fitted step cost",
        _SHADOWED,
        status="comparison.now.live_ms",
        only=_SHADOW,
    ),
    Metric(
        "eldr_shadow_measured_seconds",
        GAUGE,
        "s",
        "the same, measured by the engines",
        _SHADOWED,
        status="comparison.now.measured_ms",
        only=_SHADOW,
    ),
)
