"""One trace of a request: the client's, with our stages and with vLLM's own spans of both engines."""

from __future__ import annotations

from collector import Collector
from service import Service, wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_engines_spans_and_ours_are_in_the_clients_trace(service: Service, collector: Collector) -> None:
    unsampled = f"{TRACE[::-1]}"
    for trace, flags in ((unsampled, "00"), (TRACE, "01")):
        answer = service.client.with_options(
            default_headers={"traceparent": f"00-{trace}-{PARENT}-{flags}"}
        ).completions.with_raw_response.create(
            model="eldr-demo", prompt="one trace", max_tokens=4, stream=True
        )
        assert answer.headers["x-eldr-trace"] == trace
        assert list(answer.parse())
    engines = "llm_request"  # vLLM's name of it
    wait_for(
        lambda: sum(span.name == engines for span in collector.of(TRACE)) >= 2,
        "both engines have sent their spans",
        30,
    )
    wait_for(
        lambda: any(span.parent == PARENT for span in collector.of(TRACE)), "the request's span is there"
    )
    spans = collector.of(TRACE)
    (root,) = [span for span in spans if span.parent == PARENT]
    assert (root.service, root.name) == ("eldr-serve", "POST /v1/completions")
    children = [span for span in spans if span.parent == root.id]
    ours = sorted(span.name for span in children if span.service == "eldr-serve")
    assert ours == ["first_token", "place", "prefill", "stream", "transport"]
    assert [span.name for span in children if span.service != "eldr-serve"] == [engines] * 2
    assert not collector.of(unsampled)
