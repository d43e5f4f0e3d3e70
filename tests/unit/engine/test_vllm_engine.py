"""The vLLM engine: prefill, decode, errors, and the first prompt of an engine that starts."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm.deployment import LLMServer
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from eldr_serve.engine.calls import EXPERT_COUNTS_KEY, REQUEST_KEY
from eldr_serve.engine.protocol import EngineRequest, PrefilledPrompt
from eldr_serve.engine.vllm.compat import serve_llm
from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError, check_uses_attributes
from eldr_serve.engine.vllm.compat.messages import SERVING_NAMES
from eldr_serve.engine.vllm.engine import VllmEngine
from eldr_serve.engine.vllm.measurements import MEASUREMENTS
from eldr_serve.errors import ConfigurationError, RequestRefusedError, error_body
from eldr_serve.experts.signature import pack_counts
from eldr_serve.replicas.servers import describe_error

# Ray's destructor is a coroutine, which Serve awaits.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'LLMServer.__del__'")


def vllm_engine(**state: Any) -> VllmEngine:
    """Return an engine over Ray's VLLMEngine with these attributes in vLLM's application state."""
    return VllmEngine(SimpleNamespace(engine=SimpleNamespace(_app_state=SimpleNamespace(**state))), "m")


def answer_to(error: Exception) -> tuple[int, bytes]:
    """Return the status and the body that a client gets."""
    return describe_error("generate", error, VllmEngine)


def error(code: int, message: str = "no") -> Any:
    """Return an error as vLLM answers it."""
    body = error_body(message, code).decode()
    return SimpleNamespace(error=SimpleNamespace(code=code), model_dump_json=lambda: body)


class Serving:
    """A fake of vLLM's serving object, whose engine client accepts at most three log-probabilities.

    Args:
        response: transfer parameters, or an error, for every prompt.
    """

    chat_completion_stream_generator = completion_stream_generator = None

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
        if hasattr(self.response, "error"):
            return self.response
        assert request.stream
        params = request.to_sampling_params(9, {})  # this raises an error for a temperature below 0
        self.engine_client.generate([1, 2, 3], params, raw_request.headers["x-request-id"])
        return self._stream()

    create_chat_completion = create_completion

    async def _stream(self) -> AsyncIterator[str]:
        self.begun.append(True)
        yield "never"


async def prefill(response: Any, **fields: Any) -> tuple[Serving, Any]:
    """Return the serving object of a prefill call, and its result or the answer to its error."""
    serving = Serving(response)
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    engine = vllm_engine(openai_serving_completion=serving)
    try:
        prefilled: Any = await engine.prefill(EngineRequest("completions", body, "id"))
    except Exception as failure:
        prefilled = answer_to(failure)
    assert not serving.begun
    return serving, prefilled


@pytest.mark.parametrize("ranks", [1, 3])
def test_slots_and_caches_are_those_of_a_rank(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=32, kv_cache_size_tokens=640),
    )
    client = SimpleNamespace(vllm_config=config)
    engine = VllmEngine(SimpleNamespace(engine=SimpleNamespace(_engine_client=client)), "m")
    monkeypatch.setattr(MEASUREMENTS, "kv_usage", {rank: 0.1 * rank for rank in range(ranks)})
    assert engine.kv_usage() == pytest.approx(0.1 * (ranks - 1))  # usage of the fullest rank
    assert [engine.kv_usage(rank) for rank in range(ranks)] == [0.1 * rank for rank in range(ranks)]
    assert (engine.ranks(), engine.slots(), engine.prefix_cache()) == (ranks, 8, (32, 640))
    monkeypatch.setattr(MEASUREMENTS, "kv_usage", {})
    assert engine.kv_usage() == engine.kv_usage(0) == 0


async def test_prefill_generates_one_token_for_every_request() -> None:
    serving, prefilled = await prefill(
        {"handed": "over"},
        max_tokens=50,
        min_tokens=5,
        temperature=0.7,
        seed=1,
        stop=["x"],
        logprobs=3,
        stream=False,
    )
    ((request_id, params),) = serving.generated
    assert (request_id, params.max_tokens, params.min_tokens, params.temperature) == ("id", 1, 0, 0.0)
    assert (params.seed, params.stop, params.logprobs, params.ignore_eos) == (None, [], None, True)
    assert params.extra_args["kv_transfer_params"]["do_remote_decode"]
    assert isinstance(prefilled, PrefilledPrompt)
    assert (prefilled.token_ids.dtype, prefilled.token_ids.tolist()) == (np.uint32, [1, 2, 3])
    assert prefilled.kv_transfer_params == {"handed": "over"}
    assert serving.seen[0].kv_transfer_params[REQUEST_KEY] == "id"
    assert serving.seen[0].max_tokens == 50  # decode gets the same


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
async def test_requests_that_decode_would_refuse_are_not_prefilled(
    fields: dict[str, Any], response: Any, status: int
) -> None:
    serving, (code, body) = await prefill(response, **fields)
    assert code == json.loads(body)["error"]["code"] == status
    assert not serving.generated


@pytest.mark.parametrize(
    ("failure", "status"), [(TypeError("a list"), 400), (ValueError("x"), 400), (RuntimeError("x"), 500)]
)
def test_only_errors_that_vllm_blames_on_the_client_are_refusals(failure: Exception, status: int) -> None:
    code, body = answer_to(failure)
    assert code == status
    assert str(failure) in json.loads(body)["error"]["message"]


# -- the decode call -----------------------------------------------------------------------------------

CHUNKS = ['data: {"choices":[{"index":0,"text":"a"}]}\n\n', "data: [DONE]\n\n"]


class Generating:
    """A fake of vLLM's serving object that streams the chunks, or returns `unstreamed`."""

    engine_client = None
    parser_cls = object()

    def __init__(self, chunks: list[str], unstreamed: Any = None) -> None:
        self.chunks, self.unstreamed, self.seen = chunks, unstreamed, []

    async def create_completion(self, request: Any, raw_request: Any) -> Any:
        self.seen.append(request)
        return self._stream() if request.stream else self.unstreamed

    create_chat_completion = create_completion

    async def _stream(self) -> AsyncIterator[str]:
        for chunk in self.chunks:
            yield chunk


async def decode(serving: Generating, method: str, **fields: Any) -> list[tuple[bytes, int]]:
    sent: list[tuple[bytes, int]] = []
    engine = vllm_engine(openai_serving_completion=serving, openai_serving_chat=serving)
    ids = np.array([5, 6], np.uint32).tobytes()
    body = json.dumps({"model": "m"} | fields).encode()
    params = {"do_remote_prefill": True}
    request = EngineRequest(method, body, "id", kv_transfer_params=params, token_ids=ids)
    await engine.generate(request, lambda payload, tokens, ids=b"": sent.append((payload, tokens)))
    return sent


class OnRank(Generating):
    """A serving object that generates, and records the rank that its engine client is asked for."""

    def __init__(self) -> None:
        super().__init__(CHUNKS, SimpleNamespace(usage=None, model_dump_json=lambda: "{}"))
        self.ranks: list[Any] = []

        async def generate(*args: Any, data_parallel_rank: int | None = None) -> AsyncIterator[Any]:
            self.ranks.append(data_parallel_rank)
            for output in ():
                yield output

        self.engine_client = SimpleNamespace(generate=generate)

    async def create_completion(self, request: Any, raw_request: Any) -> Any:
        async for _ in self.engine_client.generate([1], SamplingParams(), "id"):
            pass
        return self.unstreamed


@pytest.mark.parametrize("answers", [1, 2])
async def test_an_answer_is_generated_on_the_rank_of_its_call(answers: int) -> None:
    serving = OnRank()
    engine = vllm_engine(openai_serving_completion=serving)
    body = json.dumps({"model": "m", "prompt": "x", "n": answers}).encode()
    for rank in (0, 3, None):
        await engine.generate(EngineRequest("completions", body, "id", rank=rank), lambda *parts: None)
    assert serving.ranks == [0, 3, None]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_decode_gets_token_ids_unless_it_needs_the_prompts_text() -> None:
    serving = Generating(CHUNKS)
    assert await decode(serving, "completions", prompt="hello", stream=True) == [
        ("".join(CHUNKS).encode(), 0)
    ]
    for fields in ({"echo": True}, {"suffix": "x"}):
        await decode(serving, "completions", prompt="hello", stream=True, **fields)
    assert [request.prompt for request in serving.seen] == [[5, 6], "hello", "hello"]
    assert serving.seen[0].kv_transfer_params == {"do_remote_prefill": True}
    serving.seen.clear()
    for fields in ({}, {"echo": True}, {"return_prompt_text": True}):
        await decode(serving, "chat", stream=True, **CHAT, **fields)
    prompt_ids = [request.kv_transfer_params.get("prompt_token_ids") for request in serving.seen]
    assert prompt_ids == [[5, 6], None, None]


async def test_a_stream_fails_only_if_it_begins_with_an_error() -> None:
    failed = 'data: {"error": {"message": "no", "code": 404}}\n\n'
    with pytest.raises(Exception, match="no") as refused:
        await decode(Generating([failed, CHUNKS[1]]), "completions", prompt="x", stream=True)
    assert answer_to(refused.value)[0] == 404
    sent = await decode(Generating([CHUNKS[0], failed]), "completions", prompt="x", stream=True)
    assert sent == [((CHUNKS[0] + failed).encode(), 0)]


async def test_an_unstreamed_answer_is_counted_by_its_usage_and_errors_keep_vllms_words() -> None:
    unstreamed = SimpleNamespace(usage=SimpleNamespace(completion_tokens=31), model_dump_json=lambda: "{}")
    assert await decode(Generating([], unstreamed), "completions", prompt="x", n=2) == [(b"{}", 31)]
    with pytest.raises(Exception, match="no") as refused:
        await decode(Generating([], error(404)), "completions", prompt="x")
    assert answer_to(refused.value) == (404, error_body("no", 404))


class Drafting(Generating):
    """A serving object that streams the outputs of an engine which drafts tokens, of two answers."""

    OUTPUTS = ([[1, 2, 3]], [[4]], [[5, 6], [7]], [[]])  # token ids of each answer in each output

    def __init__(self) -> None:
        super().__init__([])

        async def generate(*args: Any) -> AsyncIterator[Any]:
            for output in self.OUTPUTS:
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids) for ids in output])

        self.engine_client = SimpleNamespace(generate=generate)

    async def _stream(self) -> AsyncIterator[str]:
        async for _ in self.engine_client.generate([1], SamplingParams(n=2), "id"):
            yield CHUNKS[0]
        yield CHUNKS[1]


@pytest.mark.parametrize(("method", "fields"), [("completions", {"prompt": "x"}), ("chat", CHAT)])
async def test_each_token_of_several_answers_is_counted(method: str, fields: dict[str, Any]) -> None:
    sent = await decode(Drafting(), method, stream=True, n=2, **fields)
    assert [tokens for _, tokens in sent] == [3, 1, 3, 0, 0]
    assert b"".join(payload for payload, _ in sent) == (4 * CHUNKS[0] + CHUNKS[1]).encode()


# -- endpoints that generate nothing -------------------------------------------------------------------


async def test_an_engine_without_vllms_tokenization_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"no VLLMEngine._app_state.serving_tokenization.create_tokenize"):
        await start(monkeypatch, {}, tokenization=object())


async def test_an_engine_without_vllms_responses_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"openai_serving_responses.create_responses"):
        await start(monkeypatch, {}, responses=object())


async def test_an_engine_whose_vllm_has_renamed_the_generator_of_streams_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Serving, "completion_stream_generator")
    with pytest.raises(RuntimeError, match=r"no VLLMEngine._app_state.openai_serving_completion.completion_"):
        await start(monkeypatch, {})


@pytest.mark.parametrize("init", ["init_app_state", "init_generate_state", "init_pooling_state"])
async def test_an_engine_whose_vllm_has_renamed_an_endpoint_does_not_start(
    monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    monkeypatch.setattr(serve_llm, init, lambda state: setattr(state, "renamed", None))
    with pytest.raises(UnsupportedEngineError, match=r"sets no attribute '(openai_)?serving_"):
        await start(monkeypatch, {})


def test_every_name_that_ray_reads_from_vllms_state_is_checked() -> None:
    """Ray 2.60 reads `openai_serving_tokenization`, which does not exist, so we do not use that name."""
    read = {
        name
        for name in re.findall(r'getattr\(\s*state, "(\w+)"', inspect.getsource(VLLMEngine.start))
        if name != "openai_serving_transcription"  # it is not one of our endpoints
    }
    wrong = set()
    for name in read:
        try:
            for init in (serve_llm.init_app_state, serve_llm.init_generate_state):
                if name in init.__code__.co_names:
                    break
            else:
                check_uses_attributes(serve_llm.init_pooling_state, name)
        except UnsupportedEngineError:
            wrong.add(name)
    assert wrong == {"openai_serving_tokenization"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "max_tokens": "many"}, "body.max_tokens"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({}, "prompt"),
    ],
)
async def test_an_error_names_the_field_that_vllm_names(fields: dict[str, Any], param: str | None) -> None:
    engine = vllm_engine(openai_serving_completion=Generating([]))
    with pytest.raises(Exception, match=r".") as refused:
        await engine.generate(
            EngineRequest("completions", json.dumps(fields).encode(), "id"), lambda *a: None
        )
    status, body = answer_to(refused.value)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


# -- the first prompt of an engine that starts ---------------------------------------------------------


async def start(
    monkeypatch: pytest.MonkeyPatch, response: Any, tokenization: Any = None, responses: Any = None
) -> tuple[Serving, list[str], Any]:
    """Start an engine, and return its serving object, the prompts that it abandoned, and its shape."""
    serving, abandoned = Serving(response), []

    async def collective_rpc(method: str, timeout: Any, args: Any, kwargs: Any) -> None:
        assert method == "eldr_abandon"
        abandoned.extend(args[0])

    async def start_engine(server: Any) -> None:
        server.engine = SimpleNamespace(
            _app_state=SimpleNamespace(
                openai_serving_chat=serving,
                openai_serving_completion=serving,
                anthropic_serving_messages=Mock(
                    spec=["create_chat_completion", "engine_client", *SERVING_NAMES]
                ),
                openai_serving_responses=responses or Mock(spec=["create_responses", "engine_client"]),
                serving_tokenization=tokenization or Mock(spec=["create_tokenize", "create_detokenize"]),
            ),
            _engine_client=SimpleNamespace(
                logger_manager=None,
                vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(enable_expert_parallel=False)),
            ),
            collective_rpc=collective_rpc,
        )

    monkeypatch.setattr(LLMServer, "start", start_engine)
    config = SimpleNamespace(model_id="m", multiplex_config=lambda: None)
    shape = await (await VllmEngine.start(config)).measure_shape()
    return serving, abandoned, shape


async def test_a_prefill_engine_with_expert_counts_starts_without_held_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed_counts = {EXPERT_COUNTS_KEY: pack_counts(np.ones((3, 4), np.uint32))}
    serving, abandoned, shape = await start(monkeypatch, packed_counts)
    assert shape == (3, 4)
    (request,) = serving.seen
    assert request.model == "m"
    assert request.kv_transfer_params["do_remote_decode"]
    assert abandoned == [request.kv_transfer_params[REQUEST_KEY]]


NO_COUNTS = r"'m' \(vLLM .*without expert counts.*scheduler_cls"


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (None, NO_COUNTS),
        ({"do_remote_prefill": True}, NO_COUNTS),
        ({EXPERT_COUNTS_KEY: "?"}, NO_COUNTS),
        (error(500, "no room"), "'m' failed its first prompt: no room"),
    ],
)
async def test_a_prefill_engine_without_expert_counts_does_not_start(
    monkeypatch: pytest.MonkeyPatch, response: Any, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        await start(monkeypatch, response)


async def answer_of(engine: VllmEngine, method: str, **body: Any) -> list[bytes]:
    """Return what an endpoint that generates nothing sends."""
    sent: list[bytes] = []
    request = EngineRequest(method, json.dumps({"model": "m"} | body).encode(), "id")
    await engine.serve_endpoint(request, lambda payload, tokens, ids=b"": sent.append(payload))
    return sent


async def test_documents_are_ranked_by_vllms_serving_object() -> None:
    requests: list[Any] = []

    async def scores(request: Any, raw_request: Any) -> Any:
        requests.append(request)
        return SimpleNamespace(body=b'{"results": []}')

    engine = vllm_engine(serving_scores=scores)
    assert await answer_of(engine, "rerank", query="x", documents=["y"], top_n=1) == [b'{"results": []}']
    assert (requests[0].query, requests[0].documents, requests[0].top_n) == ("x", ["y"], 1)


@pytest.mark.parametrize("state", [{}, {"serving_scores": None}])
async def test_a_model_that_cannot_score_ranks_nothing(state: dict[str, Any]) -> None:
    with pytest.raises(RequestRefusedError, match="does not support the 'score' task") as refused:
        await answer_of(vllm_engine(**state), "rerank", query="x", documents=["y"])
    assert refused.value.status == 400
