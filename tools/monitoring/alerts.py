"""Alert rules. Each alert has a section of docs/runbook.md under its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CRITICAL, WARNING, INFO = "critical", "warning", "info"


@dataclass(frozen=True)
class Alert:
    """One alert rule.

    Attributes:
        expr: PromQL; the alert fires while it has a result.
        after: how long it must have a result first, in Prometheus's notation; "0m": no delay.
        summary: one sentence.
    """

    name: str
    severity: str
    expr: str
    after: str
    summary: str

    def rule(self, runbook: str) -> dict[str, Any]:
        """Return the rule for a rules file; `runbook` is the page's URL."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"{runbook}#{self.name.lower()}"},
        }


def _recent(counter: str) -> str:
    """Return an expression: the counter increased in the last 15 min."""
    return f"sum(increase(ray_eldr_{counter}_total[15m])) > 0"


def _share(counter: str, above: float) -> str:
    """Return an expression: the counter exceeds this share of the placed requests."""
    return f"sum(rate(ray_eldr_{counter}_total[10m])) > {above:g} * sum(rate(ray_eldr_placed_total[10m]))"


def _ongoing(counter: str) -> str:
    """Return an expression: the counter is increasing."""
    return f"sum(rate(ray_eldr_{counter}_total[5m])) > 0"


def _risen(histogram: str) -> str:
    """Return an expression: the median is more than 1.5 times that of the last day."""

    def median(window: str) -> str:
        return f"histogram_quantile(0.5, sum by (le) (rate(ray_eldr_{histogram}_bucket[{window}])))"

    return f"{median('15m')} > 1.5 * {median('1d')}"


ALERTS = (
    Alert("EldrNoMetrics", CRITICAL, "absent(ray_eldr_ingress_ready)", "5m", "No ingress exports metrics."),
    Alert(
        "EldrNotReady", CRITICAL, "min(ray_eldr_ingress_ready) < 1", "10m",
        "An ingress is not ready: an engine is down or cold.",
    ),
    Alert(
        "EldrRouterAway", CRITICAL, "max(ray_eldr_ingress_router_away) > 0", "2m",
        "The DecodeRouter does not answer; requests are placed by load alone.",
    ),
    Alert("EldrStreamsLost", CRITICAL, _recent("streams_lost"), "0m", "Streams ended with engine_lost."),
    Alert(
        "EldrEngineLost", WARNING, _recent("engine_lost"), "0m",
        "An engine's core has died, or stood still, while its replica lived.",
    ),
    Alert(
        "EldrPrefillFails", WARNING, _share("prefill_retries", 0.05), "5m",
        "More than 5 % of requests needed another prefill call.",
    ),
    Alert(
        "EldrDecodeFails", WARNING, _share("reroute", 0.05), "5m",
        "More than 5 % of requests were placed again after a failure.",
    ),
    Alert("EldrReplicaSetAside", WARNING, _recent("set_aside"), "0m", "A replica fails again and again."),
    Alert(
        "EldrWithoutPrefill", WARNING, _ongoing("whole_without_prefill"), "2m",
        "No prefill replica is reached; decode engines prefill.",
    ),
    Alert(
        "EldrPrefillFull", WARNING, _ongoing("refused_prefill_full"), "5m",
        "Requests get 503: the KV caches of all prefill engines are full.",
    ),
    Alert(
        "EldrPrefillBacklog", WARNING, _ongoing("refused_prefill_backlog"), "5m",
        "Requests get 503: too many prompts wait for prefill.",
    ),
    Alert(
        "EldrDecodeFull", WARNING, _ongoing("queue_expired"), "5m",
        "Requests get 503: no decode worker is free in time.",
    ),
    Alert(
        "EldrOverload", WARNING, _ongoing("refused_overload"), "5m",
        "Requests get 429: all places are taken.",
    ),
    Alert(
        "EldrLoopStands", WARNING,
        'sum(increase(ray_eldr_loop_stalls_total{role=~"ingress|router"}[15m])) > 0', "0m",
        "The event loop of an ingress or of the router stood still for 0.5 s or longer.",
    ),
    Alert(
        "EldrTtftRisen", WARNING, _risen("ttft_seconds"), "15m",
        "The median time to the first token is 1.5 times that of the last day.",
    ),
    Alert(
        "EldrTpotRisen", WARNING, _risen("tpot_seconds"), "15m",
        "The median time per output token is 1.5 times that of the last day.",
    ),
    Alert(
        "EldrSignaturesMissing", WARNING, _share("signature_missing", 0.05), "10m",
        "More than 5 % of requests are placed without signature.",
    ),
    Alert("EldrPolicyFails", WARNING, _recent("policy_errors"), "0m", "The policy raises errors."),
    Alert(
        "EldrPredictorFails", WARNING, _recent("predictor_failures"), "0m",
        "The policy's predictor gives what cannot be used.",
    ),
    Alert(
        "EldrPredictorOff", INFO, "max(ray_eldr_predictor_on) < 1 and max(ray_eldr_predictor_prompts) > 1000",
        "30m", "The signature predictor is no better than the mean prompt, so it is off.",
    ),
    Alert("EldrShadowFails", INFO, _recent("shadow_errors"), "0m", "The shadow raised an error and is off."),
    Alert(
        "EldrRefitAdvised", INFO, "max(ray_eldr_refit_advised) > 0", "1h",
        "The routing table was fitted for another number of decode workers.",
    ),
)  # fmt: skip


def rules(runbook: str) -> dict[str, Any]:
    """Return the content of Prometheus's rules file."""
    return {"groups": [{"name": "eldr", "rules": [alert.rule(runbook) for alert in ALERTS]}]}
