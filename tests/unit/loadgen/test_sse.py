"""Times and text of a stream of tokens."""

import itertools
import json

import pytest

from loadgen.sse import StreamError, StreamTiming, read_stream


def event(**choice: object) -> str:
    return "data: " + json.dumps({"choices": [choice]})


def read(*lines: str | bytes) -> StreamTiming:
    """Read the lines with a clock that advances by 0.1 s at each reading."""
    tenths = itertools.count(1)
    return read_stream(lines, 0.0, lambda: 0.1 * next(tenths))


def test_a_chat_stream_gives_times_and_text() -> None:
    timing = read(
        event(delta={"role": "assistant", "content": ""}),
        "",
        ": a comment",
        event(delta={"content": "one"}),
        event(delta={"content": " two"}).encode(),
        event(delta={"content": ""}),  # half a character
        event(delta={"content": "three"}, finish_reason="length"),
        'data: {"choices": [], "usage": {"completion_tokens": 4}}',
        "data: [DONE]",
        event(delta={"content": "after the end"}),
    )
    assert timing.text == "one twothree"
    assert timing.chunk_times_s == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert (timing.ttft_s, timing.tpot_s) == pytest.approx((0.2, 0.1))
    assert (timing.completion_tokens, timing.finish_reason) == (4, "length")


def test_tokens_of_one_chunk_are_counted_and_one_token_has_no_tpot() -> None:
    usage = 'data: {"usage": {"completion_tokens": 4}}'
    assert read(event(text="a"), event(text="bcd"), usage, "data: [DONE]").tpot_s == pytest.approx(0.1 / 3)
    assert read(event(text="a"), "data: [DONE]").tpot_s is None


@pytest.mark.parametrize("line", [event(text="a"), 'data: {"error": {"message": "lost"}}', "data: {not json"])
def test_a_stream_that_fails_is_an_error(line: str) -> None:
    with pytest.raises(StreamError):
        read(line, *([] if "text" in line else ["data: [DONE]"]))


@pytest.mark.parametrize(
    ("error", "message"), [({"message": "too late"}, "too late"), ("too late", "too late"), (None, "None")]
)
def test_an_error_event_of_any_form_ends_the_stream(error: object, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read("data: " + json.dumps({"error": error}))
