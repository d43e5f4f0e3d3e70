"""Counters of the router's status, `counters` in `GET /eldr/status`, and their metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from eldr_serve.metrics.definition import COUNTER, Metric


class _Event(StrEnum):
    """A counted event; its value is the key of its counter in the status.

    Attributes:
        unit: unit of the counter.
        about: description, one phrase.
    """

    unit: str
    about: str

    def __new__(cls, key: str, unit: str, about: str) -> Self:
        event = str.__new__(cls, key)
        event._value_ = key
        event.unit, event.about = unit, about
        return event


class RouterEvent(_Event):
    """Events that the router counts."""

    PLACED = "placed", "requests", "granted leases"
    MOST_SIMILAR_WORKER = (
        "most_similar_worker",
        "requests",
        "placed on the worker with the most similar centroid",
    )
    REROUTED = "rerouted", "requests", "placed again after a failure"
    QUEUED = "queued", "requests", "waited in the decode queue"
    PLACED_BY_INGRESS = (
        "placed_by_ingress",
        "requests",
        "placed by their ingress and reported to the router later",
    )
    PREFILL_TOKENS = "prefill_tokens", "tokens", "prompt tokens of requests on whole replicas"
    PREFILL_TOKENS_CACHED = (
        "prefill_tokens_cached",
        "tokens",
        "prompt tokens on whole replicas that were expected in the worker's prefix cache",
    )
    COUNTS_MISSING = "counts_missing", "requests", "placed without expert counts, measured or predicted"
    COUNTS_PREDICTED = "counts_predicted", "requests", "placed with predicted expert counts"
    COUNTS_MEASURED = (
        "counts_measured",
        "requests",
        "expert counts measured after the placement by a prediction",
    )
    PREDICTOR_FAILURES = "predictor_failures", "predictions", "unusable predictions of a policy's predictor"
    POLICY_ERRORS = "policy_errors", "requests", "placed by load because the policy raised an error"
    POLICY_CHANGES = "policy_changes", "changes", "changes of the policy"
    TABLE_SWAPS = "table_swaps", "changes", "changes of the routing table"
    TABLES_DISCARDED = "tables_discarded", "tables", "live tables that did not fit the engines' expert counts"
    POLICIES_DISCARDED = (
        "policies_discarded",
        "policies",
        "restored policies and shadows that could not be made; the deployed ones replaced them",
    )
    REFITS = "refits", "changes", "changes to a table that the signature pool refitted"
    TABLES_REFUSED = "tables_refused", "tables", "tables of the signature pool that were not swapped in"
    PREDICTOR_SWAPS = "predictor_swaps", "changes", "changes of the signature predictor"
    SHADOW_ERRORS = "shadow_errors", "errors", "errors of the shadow, each of which switched it off"
    SETTINGS_RESTORED = "settings_restored", "times", "the router restored newer settings from an ingress"
    LEASES_RESTORED = "leases_restored", "requests", "leases that the router restored from an ingress"
    LEASES_OF_LOST_INGRESSES = (
        "leases_of_lost_ingresses",
        "requests",
        "leases that ended because their ingress was lost",
    )
    QUEUED_OF_LOST_INGRESSES = (
        "queued_of_lost_ingresses",
        "requests",
        "removed from the decode queue because their ingress was lost",
    )


class IngressEvent(_Event):
    """Events that each ingress counts; the router adds up the counts of all ingresses."""

    QUEUE_EXPIRED = "queue_expired", "requests", "refused (503) because no decode worker became free in time"
    PLACED_BY_LOCAL_FALLBACK = (
        "placed_by_local_fallback",
        "requests",
        "placed by their ingress because the router did not answer",
    )
    PREFILLS = "prefills", "calls", "prefill calls that succeeded"
    PREFIX_TOKENS_PREDICTED = (
        "prefix_tokens_predicted",
        "tokens",
        "prompt tokens expected in the prefix cache, if their engine then reported the true number",
    )
    PREFIX_TOKENS_MEASURED = (
        "prefix_tokens_measured",
        "tokens",
        "prompt tokens that were in the prefix cache, as their engine reported",
    )
    PREFILL_RETRIES = "prefill_retries", "calls", "prefill calls that failed and were retried"
    PREFILLED_BY_DECODE = (
        "prefilled_by_decode",
        "requests",
        "prefilled by a decode engine: no prefill engine was reachable, or one failed or was full mid-answer",
    )
    PREFILLED_LOCALLY = (
        "prefilled_locally",
        "requests",
        "prefilled by a decode engine because that was predicted to be sooner",
    )
    RESUMED = "resumed", "answers", "continued on another engine after theirs was lost"
    MOVED = "moved", "answers", "continued on another engine because theirs leaves"
    STREAMS_LOST = "streams_lost", "streams", "ended with `engine_lost`"
    REFUSED_LOST_ENGINES = (
        "refused_lost_engines",
        "requests",
        "refused (500) because engines that worked on them were lost",
    )
    SLOW_CLIENTS = "slow_clients", "streams", "cancelled because their client did not read"
    EJECTED = "ejected", "times", "an ingress ejected a replica that failed repeatedly"
    REFUSED_PREFILL_FULL = (
        "refused_prefill_full",
        "requests",
        "refused (503) because all prefill engines were full",
    )
    REFUSED_PREFILL_BACKLOG = (
        "refused_prefill_backlog",
        "requests",
        "refused (503) because the prefill queue was too long",
    )
    REFUSED_DECODE_BACKLOG = (
        "refused_decode_backlog",
        "requests",
        "refused (503) because too many requests waited for a slot of an engine",
    )
    REFUSED_OBJECTIVE = (
        "refused_objective",
        "requests",
        "refused (503) because they would miss their objective",
    )
    REFUSED_OVERLOAD = "refused_overload", "requests", "refused (429) by the concurrency limit"
    REFUSED_PENDING_BODIES = (
        "refused_pending_bodies",
        "requests",
        "refused (503) because pending bodies exceeded the memory limit",
    )
    REFUSED_LIMITS = "refused_limits", "requests", "refused (429) because a tenant had used up a limit"
    BACKGROUND_FAILURES = (
        "background_failures",
        "times",
        "background work failed, and was started again after a delay",
    )
    ROUTER_LOST = "router_lost", "times", "an ingress lost the router"


class NamedCounter(StrEnum):
    """A group of counters, one for each name."""

    REASON = "reason"
    FAILED_WORK = "failed_work"

    def key(self, name: str) -> str:
        """Return the key of the counter of this name in the status."""
        return f"{self}:{name}"


COUNTERS = {
    event.value: Metric(
        f"eldr_{event}_total",
        COUNTER,
        event.unit,
        event.about,
        ("policy",),
        status=f"counters.{event}",
    )
    for event in (*RouterEvent, *IngressEvent)
}
COUNTERS_BY_NAME = {
    NamedCounter.REASON.value: Metric(
        "eldr_placed_by_reason_total",
        COUNTER,
        "requests",
        "granted leases by the rule that decided",
        ("policy", "reason"),
        status="counters.reason:NAME",
        only="once a request was placed",
    ),
    NamedCounter.FAILED_WORK.value: Metric(
        "eldr_background_failures_by_work_total",
        COUNTER,
        "times",
        "background work of an ingress failed, by its name in the log",
        ("policy", "work"),
        status="counters.failed_work:NAME",
        only="once background work of an ingress has failed",
    ),
}
