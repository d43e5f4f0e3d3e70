"""Observability of a running application: one trace per request, and every metric of the dashboards."""

import contextlib
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eldr_serve.metrics import METRICS, PREFIX
from tests.e2e.collector import Collector, ReceivedSpan
from tests.e2e.service import HTTP, Service, wait_for
from tests.support.monitoring_files import FOREIGN, expressions

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"prefill", "place", "transport", "first_token", "stream"}
TOKENS = 9
# Series of rules and dashboards that a request alone does not create, and their cause.
SOMETIMES = {
    **dict.fromkeys(
        [
            f"ray_eldr_shadow_{name}"
            for name in (
                "change_ratio",
                "change_low_ratio",
                "change_high_ratio",
                "live_seconds",
                "measured_seconds",
            )
        ],
        "a shadow has priced tokens",
    ),
    **dict.fromkeys(
        [f"ray_eldr_predictor_{name}" for name in ("gain", "cosine", "on", "prompts")],
        "the policy has a signature predictor",
    ),
    "ray_eldr_decode_queue_wait_seconds_bucket": "a request has waited in a decode queue",
    "ray_eldr_step_cost_error_ratio": "decode steps have differed enough for a step cost",
    "ray_vllm_num_preemptions_total": "vLLM has preempted a request",
}


def ask(service: Service, **headers: str) -> httpx.Response:
    """Stream some tokens to the end."""
    body = {"model": "eldr-demo", "prompt": "trace this", "max_tokens": TOKENS, "stream": True}
    answer = HTTP.post(f"{service.url}/v1/completions", json=body | {"ignore_eos": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_our_spans_and_those_of_both_engines_are_one_tree(service: Service, collector: Collector) -> None:
    not_sampled = ask(service).headers["x-eldr-trace"]
    answer = ask(service, traceparent=f"00-{TRACE}-{CLIENT}-01")
    assert answer.headers["x-eldr-trace"] == TRACE

    wait_for(lambda: len(collector.spans(TRACE)) >= len(STAGES) + 3, "all spans are exported", 20)
    spans = collector.spans(TRACE)
    (root,) = (span for span in spans if span.parent == CLIENT)
    assert root.name == "POST /v1/completions"
    children = [span for span in spans if span is not root]
    assert {span.parent for span in children} == {root.id}
    assert len({span.id for span in spans}) == len(spans) == len(STAGES) + 3

    ours = {span.name: span for span in children if span.source == root.source}
    assert root.source["service.name"] == "eldr-serve"
    assert set(ours) == STAGES
    worker = answer.headers["x-eldr-decode-worker"]
    assert {ours[name].attributes["eldr.worker"] for name in STAGES - {"prefill", "place"}} == {worker}

    prefill, decode = sorted(
        (span for span in children if span.name == "llm_request"), key=lambda span: span.start_ns
    )
    name = answer.headers["x-eldr-request"]
    assert f"{name}-p0" in prefill.attributes["gen_ai.request.id"]
    assert name in decode.attributes["gen_ai.request.id"]
    assert generated_tokens(prefill) == 1
    assert generated_tokens(decode) == TOKENS
    assert prefill.source["vllm.process_id"] != decode.source["vllm.process_id"]
    assert not collector.spans(not_sampled)


def generated_tokens(span: ReceivedSpan) -> int:
    """Return the tokens that vLLM generated in the span."""
    return int(span.attributes["gen_ai.usage.completion_tokens"])


def test_every_metric_of_rules_and_dashboards_is_exported(service: Service) -> None:
    used_names = {name for _, expr in expressions() for name in re.findall(rf"\b{PREFIX}\w+", expr)}
    assert len(used_names) > 60
    exported: set[str] = set()

    def all_there() -> bool:
        ask(service)  # Ray exports only gauges set since the last export
        families = text_string_to_metric_families(service.metrics())
        exported.update(sample.name for family in families for sample in family.samples)
        return used_names - SOMETIMES.keys() <= exported

    with contextlib.suppress(pytest.fail.Exception):  # the list of missing metrics says more
        wait_for(all_there, "every metric is exported", 40)
    missing = sorted(used_names - SOMETIMES.keys() - exported)
    assert missing == []
    assert SOMETIMES.keys() <= used_names
    for name in SOMETIMES.keys() - FOREIGN.keys():  # tests/unit finds those in the installed vLLM
        metric = METRICS[name.removeprefix(PREFIX).removesuffix("_bucket")]
        assert metric.only, f"{name} is there without an event"
