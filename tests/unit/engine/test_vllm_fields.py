"""The comparison with a plain vLLM server tries each field of the clients, or has a reason not to."""

from typing import Any, get_args

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from eldr_serve.engine.vllm.requests.request_parsing import REQUESTS
from loadgen.results import read_rows
from tests.support.vllm_answers import Refusal, differences, join_chunks, join_events
from tests.support.vllm_cases import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from tests.support.vllm_fields import (
    COUNT_TOKENS,
    DIFFERENT,
    EMBEDDINGS,
    MESSAGES,
    NOT_TRIED,
    READ,
    RERANK,
    RESPONSES,
    SCORE,
    TRIED,
    is_different,
    requests_of,
)
from tests.support.vllm_table import FieldTable, is_alike, try_field

# Endpoint -> the service's name of its method, and the types of a vendor's client
TYPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    CHAT: ("chat", get_args(chat_create_params.CompletionCreateParams)),
    COMPLETIONS: ("completions", get_args(completion_create_params.CompletionCreateParams)),
    RESPONSES: ("responses", get_args(response_create_params.ResponseCreateParams)),
    MESSAGES: ("messages", get_args(message_create_params.MessageCreateParams)),
    COUNT_TOKENS: ("count_tokens", (message_count_tokens_params.MessageCountTokensParams,)),
    TOKENIZE: ("tokenize", ()),
    DETOKENIZE: ("detokenize", ()),
}


def fields_of_vllm(method: str) -> set[str]:
    """Return the fields of vLLM's request types."""
    request = REQUESTS[method]
    return {name for one in get_args(request) or (request,) for name in one.model_fields}


@pytest.mark.parametrize("path", TYPES)
def test_each_field_of_a_client_and_of_vllm_is_tried_or_has_a_reason(path: str) -> None:
    method, clients = TYPES[path]
    of_vllm = fields_of_vllm(method)
    of_client = {name for client in clients for name in client.__annotations__}
    assert not clients or "messages" in of_client or "model" in of_client
    assert not (of_vllm | of_client) - TRIED[path].keys() - NOT_TRIED[path].keys(), "try it, or give a reason"
    assert not TRIED[path].keys() & NOT_TRIED[path].keys()
    unknown = {name for name, reason in NOT_TRIED[path].items() if "does not know" in reason}
    assert not unknown & of_vllm, "plain vLLM knows it now: try it"
    assert TRIED[path].keys() | NOT_TRIED[path].keys() - unknown <= of_vllm


def test_each_endpoint_is_in_the_table_and_each_request_has_the_field() -> None:
    assert TRIED.keys() - set(READ) == NOT_TRIED.keys() == {*TYPES, EMBEDDINGS, SCORE, RERANK}
    assert all(name in TRIED[path] for path, name in DIFFERENT)
    assert [is_different(MESSAGES, "thinking", stream) for stream in (False, True)] == [False, True]
    assert [is_different(CHAT, "request_id", stream) for stream in (False, True)] == [True, True]
    for path, fields in TRIED.items():
        for name in fields:
            bodies = requests_of(path, name, stream=False)
            assert bodies
            assert all(name in body or name in ("stream", "(none)") for body in bodies), (path, name)


def test_a_committed_table_has_all_fields() -> None:
    rows = read_rows("like_vllm")
    assert [(row["endpoint"], row["field"]) for row in rows] == [
        (row["endpoint"], row["field"]) for row in FieldTable().rows()
    ]
    for row in rows:
        outcomes = {row["unstreamed"], row["streamed"]} - {None}
        assert outcomes or row["note"]
        different = {cell for cell in outcomes if not is_alike(cell)}
        assert not different or (different == {"differs"} and row["note"])


def chunk(**choice: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0} | choice], "usage": None}


def test_a_stream_equals_one_that_is_cut_elsewhere() -> None:
    def logprobs(*tokens: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -0.5} for token in tokens]}

    parts = [
        chunk(delta={"role": "assistant", "content": ""}, logprobs=None),
        chunk(delta={"content": "a"}, logprobs=logprobs("a")),
        chunk(delta={"content": "b"}, logprobs=logprobs("b"), finish_reason="length"),
        {"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}},
    ]
    joined = [
        parts[0],
        chunk(delta={"content": "ab"}, logprobs=logprobs("a", "b"), finish_reason="length"),
        parts[3],
    ]
    assert not differences(join_chunks(parts), join_chunks(joined))
    assert join_chunks(parts)["choices"][0]["delta"] == {"role": "assistant", "content": "ab"}
    two = [chunk(delta={"content": "x"}) | {"choices": [{"index": 1, "delta": {"content": "x"}}]}]
    assert [choice["index"] for choice in join_chunks([*two, *parts])["choices"]] == [0, 1]

    def delta(text: str) -> dict[str, Any]:
        return {"type": "response.output_text.delta", "delta": text, "logprobs": [text], "sequence_number": 1}

    done = {"type": "response.output_text.done", "text": "ab"}
    joined_events = [{"type": delta("")["type"], "delta": "ab", "logprobs": ["a", "b"]}, done]
    assert join_events([delta("a"), delta("b"), dict(done)]) == joined_events
    block = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    (event,) = join_events([block, {**block, "delta": {"type": "text_delta", "text": "b"}}])
    assert event["delta"] == {"type": "text_delta", "text": "ab"}


def test_differences_name_their_place_and_tolerate_rounding() -> None:
    theirs = {"a": [1, {"b": "x"}], "logprob": -1.0, "none": None}
    assert not differences({"a": [1, {"b": "x"}], "logprob": -1.0005}, theirs)
    assert differences({"a": [1, {"b": "y"}], "logprob": -1.01}, theirs) == [
        "answer.a[1].b: y instead of x",
        "answer.logprob: -1.01 instead of -1.0",
    ]
    assert differences({"a": [1]}, {"a": [1, 2]}) == ["answer.a: 1 items instead of 2"]
    assert differences({"a": 1}, {"a": True}) == ["answer.a: 1 instead of True"]


class Answers:
    """A server that gives the same answer to every request."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def ask(self, path: str, body: dict[str, Any], ignored: frozenset[str]) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        ({"text": "a"}, {"text": "a"}, "equal"),
        ({"text": "a"}, {"text": "b"}, "answer.text: a instead of b"),
        (Refusal(400, "n"), Refusal(400, "n"), "refused"),
        (Refusal(400, "n"), Refusal(404, None), "400 n instead of 404"),
        (Refusal(None, None), {"text": "b"}, "an error in the stream instead of an answer"),
    ],
)
def test_an_outcome_is_classified(ours: Any, theirs: Any, outcome: str) -> None:
    servers: Any = (Answers(ours), Answers(theirs))
    assert try_field(servers, COMPLETIONS, "stop", stream=False) == outcome
    table = FieldTable()
    table.add(COMPLETIONS, "stop", False, outcome)
    table.add(COMPLETIONS, "request_id", False, outcome)
    alike = is_alike(outcome)
    assert alike == (outcome in ("equal", "refused"))
    # The answers to `request_id` are documented to differ.
    assert table.surprises(COMPLETIONS, False) == {"request_id" if alike else "stop": outcome}
    assert not table.surprises(COMPLETIONS, True)
    outcome_by_field = {
        row["field"]: row["unstreamed"] for row in table.rows() if row["endpoint"] == COMPLETIONS
    }
    assert outcome_by_field["stop"] == outcome
    assert outcome_by_field["n"] == "not tried"
    assert outcome_by_field["request_id"] == (outcome if alike else "differs")
