"""OpenAI's Responses API: what is refused, how its prompts are captured, and the end of its streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.sampling_params import SamplingParams

from eldr_serve.engine.calls import is_end
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.vllm.requests.answer_forms import to_events, to_json
from eldr_serve.engine.vllm.requests.one_token_prefill import prefill_prompt
from eldr_serve.engine.vllm.requests.request_parsing import parse_request
from eldr_serve.errors import RequestRefusedError


def parse(**fields: Any) -> Any:
    body = {"model": "m", "input": "hi"} | fields
    return parse_request(
        EngineRequest("responses", json.dumps(body).encode(), "id", kv_transfer_params={"held": 1})
    )


def test_a_response_has_the_requests_id_and_its_blocks() -> None:
    parsed = parse(kv_transfer_params={"remote_host": "elsewhere"})
    assert (parsed.request_id, parsed.kv_transfer_params) == ("resp_id", {"held": 1})


@pytest.mark.parametrize("fields", [{"background": True}, {"previous_response_id": "resp_1"}])
def test_what_needs_stored_responses_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(RequestRefusedError, match=f"{name} is not supported") as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, name)


class Serving:
    """A serving object that reads the outputs of its engine client at once, and catches its errors."""

    def __init__(self) -> None:
        self.read: list[Any] = []  # outputs of which an answer would be made
        self.generated: list[tuple[Any, SamplingParams, str]] = []
        self.engine_client: Any = SimpleNamespace(
            input_processor=SimpleNamespace(process_inputs=lambda *args, **kwargs: None),
            get_supported_tasks=self._tasks,
            generate=self._generate,
        )

    async def _tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def _generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        self.generated.append((prompt, params, request_id))
        yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], kv_transfer_params={"held": 1})

    async def create_responses(self, request: Any, raw_request: Any) -> Any:
        async def outputs() -> AsyncIterator[Any]:
            client, prompt = self.engine_client, {"prompt_token_ids": [1, 2]}
            async for output in client.generate(prompt, SamplingParams(max_tokens=9), request.request_id):
                yield output

        try:
            async for output in outputs():
                self.read.append(output)
        except Exception as error:
            return SimpleNamespace(error=error)


async def test_prefill_takes_the_prompt_and_makes_no_answer() -> None:
    serving = Serving()
    engine = SimpleNamespace(_app_state=SimpleNamespace(openai_serving_responses=serving))
    output = await prefill_prompt(engine, "responses", parse(stream=True), None, [7])
    ((prompt, params, request_id),) = serving.generated
    assert (prompt["prompt_token_ids"], params.max_tokens, request_id) == ([1, 2, 7], 1, "resp_id")
    assert output.kv_transfer_params == {"held": 1}
    assert not serving.read


async def test_the_completed_response_ends_its_stream() -> None:
    async def answer() -> AsyncIterator[Any]:
        for kind in ("response.created", "response.output_text.delta", "response.completed"):
            yield SimpleNamespace(type=kind, model_dump_json=lambda **_: '{"x":"event: response.completed"}')

    events = [event.encode() async for event in to_events("responses", None, answer())]
    assert [is_end(event) for event in events] == [False, False, True]
    assert is_end(b"".join(events))
    assert not is_end(b"".join(events[:2]))


def test_unstreamed_answers_are_serialized_as_vllm_does() -> None:
    answer = SimpleNamespace(model_dump_json=lambda **form: ",".join(form))
    forms = {method: to_json(method, answer) for method in ("chat", "messages", "responses")}
    assert forms == {"chat": b"", "messages": b"exclude_none", "responses": b"by_alias"}


def test_vllms_serving_object_has_the_name_that_is_used() -> None:
    assert hasattr(OpenAIServingResponses, "create_responses")
