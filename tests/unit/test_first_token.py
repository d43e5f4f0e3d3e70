"""The prefill call: refused as decode would refuse it, else one token, rendered from the whole request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from eldr_serve.serving.compat import CompletionRequest, ErrorResponse
from eldr_serve.serving.first_token import first_token
from eldr_serve.serving.servers import _client_errors_answered
from eldr_serve.serving.wire import prefill_request


class Engine:
    """A vLLM engine client whose input processor takes at most three log-probabilities."""

    def __init__(self) -> None:
        self.generated: list[SamplingParams] = []
        self.input_processor = SimpleNamespace(process_inputs=self._process)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, request_id: str, prompt: Any, params: SamplingParams, tasks: Any, **_: Any) -> None:
        if (params.logprobs or 0) > 3:
            raise VLLMValidationError("too many logprobs")

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.generated.append(params)
        handed_over = {"remote_request_id": request_id}
        yield SimpleNamespace(prompt_token_ids=prompt, kv_transfer_params=handed_over)


class Serving:
    """vLLM's serving object: renders, checks and calls the engine; a stream is begun by its reader."""

    def __init__(self) -> None:
        self.engine_client: Any = Engine()
        self.begun = False
        self.seen: list[Any] = []

    async def create_completion(self, request: Any, raw_request: Any) -> Any:
        self.seen.append(request)
        if request.prompt == "unknown":
            return ErrorResponse(error={"message": "no such model", "type": "NotFoundError", "code": 404})
        assert request.stream
        params = request.to_sampling_params(9, {})  # raises for a temperature below 0
        self.engine_client.generate([1, 2, 3], params, raw_request.headers["x-request-id"])
        return self._stream()

    async def _stream(self) -> AsyncIterator[str]:
        self.begun = True
        yield "never"


async def prefill(**fields: Any) -> tuple[Serving, Any]:
    serving = Serving()
    request = prefill_request(CompletionRequest(**({"model": "m", "prompt": "hello"} | fields)), "id", 0)
    engine = SimpleNamespace(_oai_serving_completion=serving)
    answers = first_token(engine, "completions", request, None)
    (answer,) = [answer async for answer in _client_errors_answered(answers)]
    assert not serving.begun
    return serving, answer


async def test_one_token_is_made_whatever_was_asked_for() -> None:
    serving, answer = await prefill(
        max_tokens=50, min_tokens=5, temperature=0.7, seed=1, stop=["x"], logprobs=3, stream=False
    )
    (params,) = serving.engine_client.generated
    assert (params.max_tokens, params.min_tokens, params.temperature) == (1, 0, 0.0)
    assert (params.seed, params.stop, params.logprobs, params.ignore_eos) == (None, [], None, True)
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"]
    assert answer.usage.prompt_tokens == 3
    assert answer.kv_transfer_params == {"remote_request_id": "id"}
    assert serving.seen[0].max_tokens == 50  # as decode will see it


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"logprobs": 4}, 400),
        ({"temperature": -1}, 400),
        ({"top_p": 7}, 400),
        ({"min_tokens": 10}, 400),
        ({"prompt": "unknown"}, 404),
    ],
)
async def test_what_decode_would_refuse_costs_no_prefill(fields: dict[str, Any], status: int) -> None:
    serving, answer = await prefill(**fields)
    assert isinstance(answer, ErrorResponse)
    assert answer.error.code == status
    assert not serving.engine_client.generated


async def test_faults_of_the_engine_stay_faults_and_a_begun_answer_is_not_changed() -> None:
    async def fails(error: Exception, *before: Any) -> AsyncIterator[Any]:
        for answer in before:
            yield answer
        raise error

    (answer,) = [answer async for answer in _client_errors_answered(fails(TypeError("a list")))]  # type: ignore[arg-type]
    assert (answer.error.code, answer.error.message) == (400, "a list")
    for error, before in ((RuntimeError("x"), ()), (ValueError("x"), ("chunk",))):
        with pytest.raises(type(error)):
            [answer async for answer in _client_errors_answered(fails(error, *before))]  # type: ignore[arg-type]
