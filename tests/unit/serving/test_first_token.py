"""The prefill call: refused as decode would refuse it, else one token, rendered from the whole request.

By one an engine that counts no experts never becomes ready, and says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from one_path import answering, error
from ray.serve.llm.deployment import LLMServer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from eldr_serve.serving.compat import CompletionRequest, ErrorResponse
from eldr_serve.serving.errors import ConfigurationError
from eldr_serve.serving.first_token import first_token
from eldr_serve.serving.servers import PrefillServer, _client_errors_answered
from eldr_serve.serving.wire import REQUEST, SIGNATURE, prefill_request
from eldr_serve.signature import pack_counts

# Ray's destructor is a coroutine, which Serve awaits.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'LLMServer.__del__'")


class Serving:
    """vLLM's serving object with its engine client, which takes at most three log-probabilities.

    It renders, checks and calls the engine; a stream is begun by its reader.

    Args:
        response: to every prompt, transfer parameters or an error.
    """

    def __init__(self, response: Any) -> None:
        self.response = response
        self.seen: list[Any] = []
        self.generated: list[tuple[str, SamplingParams]] = []
        self.begun: list[bool] = []
        self.engine_client: Any = SimpleNamespace(
            input_processor=SimpleNamespace(process_inputs=self._process),
            get_supported_tasks=self._tasks,
            generate=self._generate,
        )

    async def _tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, request_id: str, prompt: Any, params: SamplingParams, tasks: Any, **_: Any) -> None:
        if (params.logprobs or 0) > 3:
            raise VLLMValidationError("too many logprobs")

    async def _generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        self.generated.append((request_id, params))
        yield SimpleNamespace(prompt_token_ids=prompt, kv_transfer_params=self.response)

    async def create_completion(self, request: Any, raw_request: Any) -> Any:
        self.seen.append(request)
        if isinstance(self.response, ErrorResponse):
            return self.response
        assert request.stream
        params = request.to_sampling_params(9, {})  # raises for a temperature below 0
        self.engine_client.generate([1, 2, 3], params, raw_request.headers["x-request-id"])
        return self._stream()

    create_chat_completion = create_completion

    async def _stream(self) -> AsyncIterator[str]:
        self.begun.append(True)
        yield "never"


async def prefill(response: Any, **fields: Any) -> tuple[Serving, Any]:
    serving = Serving(response)
    request = prefill_request(CompletionRequest(**{"model": "m", "prompt": "hello", **fields}), "id", 0)
    engine = SimpleNamespace(_oai_serving_completion=serving)
    answers = first_token(engine, "completions", request, None)
    (answer,) = [answer async for answer in _client_errors_answered(answers)]
    assert not serving.begun
    return serving, answer


async def test_one_token_is_made_whatever_was_asked_for() -> None:
    serving, answer = await prefill(
        {"handed": "over"}, max_tokens=50, min_tokens=5, temperature=0.7, seed=1, stop=["x"], logprobs=3,
        stream=False,
    )  # fmt: skip
    ((request_id, params),) = serving.generated
    assert (request_id, params.max_tokens, params.min_tokens, params.temperature) == ("id", 1, 0, 0.0)
    assert (params.seed, params.stop, params.logprobs, params.ignore_eos) == (None, [], None, True)
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"]
    assert answer.usage.prompt_tokens == 3
    assert answer.kv_transfer_params == {"handed": "over"}
    assert serving.seen[0].max_tokens == 50  # as decode will see it


@pytest.mark.parametrize(
    ("fields", "response", "status"),
    [
        ({"logprobs": 4}, {}, 400),
        ({"temperature": -1}, {}, 400),
        ({"top_p": 7}, {}, 400),
        ({"min_tokens": 10}, {}, 400),
        ({}, error(404), 404),
    ],
)
async def test_what_decode_would_refuse_costs_no_prefill(
    fields: dict[str, Any], response: Any, status: int
) -> None:
    serving, answer = await prefill(response, **fields)
    assert isinstance(answer, ErrorResponse)
    assert answer.error.code == status
    assert not serving.generated


async def test_faults_of_the_engine_stay_faults_and_a_begun_answer_is_not_changed() -> None:
    def answers(*chunks: Any) -> Any:
        return _client_errors_answered(answering(*chunks)(None))

    (answer,) = [answer async for answer in answers(TypeError("a list"))]
    assert (answer.error.code, answer.error.message) == (400, "a list")
    for chunks in ([RuntimeError("x")], ["chunk", ValueError("x")]):
        with pytest.raises(type(chunks[-1])):
            [answer async for answer in answers(*chunks)]


# -- the first prompt of an engine that starts ---------------------------------------------------------


async def start(monkeypatch: pytest.MonkeyPatch, response: Any) -> tuple[Serving, list[str]]:
    """Of a server whose engine is started so: what it served, and the prompts that it abandoned."""
    serving, abandoned = Serving(response), []

    async def collective_rpc(method: str, timeout: Any, args: Any, kwargs: Any) -> None:
        assert method == "eldr_abandon"
        abandoned.extend(args[0])

    async def start_engine(server: Any) -> None:
        server.engine = SimpleNamespace(
            _oai_serving_chat=serving, _oai_serving_completion=serving, collective_rpc=collective_rpc
        )

    monkeypatch.setattr(LLMServer, "start", start_engine)
    server = object.__new__(PrefillServer)
    await server.__init__(SimpleNamespace(model_id="m", multiplex_config=lambda: None))  # as Serve does
    return serving, abandoned


async def test_a_prefill_engine_that_counts_starts_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, abandoned = await start(monkeypatch, {SIGNATURE: pack_counts(np.ones((3, 4), np.uint32))})
    (request,) = serving.seen
    assert request.model == "m"
    assert request.kv_transfer_params["do_remote_decode"]
    assert abandoned == [request.kv_transfer_params[REQUEST]]


NO_COUNTS = r"'m' \(vLLM .*without an expert signature.*scheduler_cls"


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (None, NO_COUNTS),
        ({"do_remote_prefill": True}, NO_COUNTS),
        ({SIGNATURE: "?"}, NO_COUNTS),
        (error(500, "no room"), "'m' failed its first prompt: no room"),
    ],
)
async def test_a_prefill_engine_that_counts_no_experts_does_not_start(
    monkeypatch: pytest.MonkeyPatch, response: Any, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        await start(monkeypatch, response)
