"""vLLM's own serving objects and output path, over a client that computes nothing."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.sampling_params import SamplingParams
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from eldr_serve.engine.vllm.engine import VllmEngine
from examples.demo_model import WEIGHTS

TOKENIZER: Any = AutoTokenizer.from_pretrained(WEIGHTS)
PROMPT = TOKENIZER.encode("Once upon a time")
EOS = 0


class FakeClient:
    """An engine client for vLLM's serving objects, which computes nothing.

    Args:
        token: returns the next token id, given all token ids before it.
        dies_after: number of generated tokens after which a call fails; None: no call fails.
    """

    def __init__(self, token: Callable[[list[int]], int], dies_after: int | None = None) -> None:
        self._token = token
        self._dies_after = dies_after
        self.prompts: list[list[int]] = []
        self.open = 0
        self.renderer = SimpleNamespace(tokenizer=TOKENIZER)
        self.input_processor = SimpleNamespace(process_inputs=self._process)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _process(self, request_id: str, prompt: Any, params: SamplingParams, tasks: Any) -> EngineCoreRequest:
        ids = list(prompt["prompt_token_ids"])
        return EngineCoreRequest(request_id, ids, None, params, None, 0.0, None, None, None)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        request = self._process(request_id, prompt, params, ())
        request.external_req_id = request_id
        self.prompts.append(request.prompt_token_ids or [])
        processor = OutputProcessor(TOKENIZER, log_stats=False)
        processor.add_request(request, prompt.get("prompt"))
        token_ids: list[int] = []
        self.open += 1
        try:
            while True:
                if len(token_ids) == self._dies_after:
                    raise RuntimeError("the engine is gone")
                token_ids.append(self._token([*self.prompts[-1], *token_ids]))
                core = EngineCoreOutput(request_id, token_ids[-1:])
                if params.logprobs is not None:
                    core.new_logprobs = _logprobs(token_ids[-1], params.logprobs)
                if token_ids[-1] == EOS and len(token_ids) > params.min_tokens:
                    core.finish_reason = FinishReason.STOP
                elif len(token_ids) == params.max_tokens:
                    core.finish_reason = FinishReason.LENGTH
                for output in processor.process_outputs([core]).request_outputs:
                    yield output
                if not processor.request_states:
                    return
        finally:
            self.open -= 1


def _logprobs(token: int, top: int) -> LogprobsLists:
    """Return log-probabilities in which the token has rank 1 or 3."""
    rank = 1 + 2 * (token % 2)
    likely = [token + number for number in range(1, top + 1)]
    if rank <= top:
        likely[rank - 1] = token
    row = [token, *likely]
    values = np.array([[-0.1 * (found % 7) for found in row]])
    return LogprobsLists(np.array([row]), values, np.array([rank]))


class _Metadata:
    final_usage_info: Any = None


class _Serving:
    """Attributes that vLLM's serving objects read."""

    enable_force_include_usage = enable_per_request_metrics = enable_log_outputs = False
    enable_prompt_tokens_details = log_error_stack = enable_auto_tools = False
    _include_reasoning_tokens_details = return_tokens_as_token_ids = use_harmony = False
    parser_cls = request_logger = None
    response_role = "assistant"
    system_fingerprint = "vllm-test"

    def _input(self) -> dict[str, Any]:
        return {"prompt_token_ids": PROMPT, "prompt": "Once upon a time"}


class FakeCompletions(_Serving, OpenAIServingCompletion):
    """vLLM's completions after the prompt is rendered."""

    def __init__(self, client: FakeClient, created: int) -> None:
        self.engine_client: Any = client
        self._created = created

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        params = request.to_sampling_params(request.max_tokens, {})
        outputs = merge_async_iterators(self.engine_client.generate(self._input(), params, "r-0"))
        if request.stream:
            return self.completion_stream_generator(
                request,
                [self._input()],
                outputs,
                "cmpl-r",
                self._created,
                "m",
                num_prompts=1,
                tokenizer=TOKENIZER,
                request_metadata=_Metadata(),
            )
        last = [output async for _, output in outputs][-1]
        return self.request_output_to_completion_response(
            [last], request, "cmpl-r", self._created, "m", TOKENIZER, _Metadata()
        )


class FakeChat(_Serving, OpenAIServingChat):
    """vLLM's chats after the prompt is rendered."""

    def __init__(self, client: FakeClient) -> None:
        self.engine_client: Any = client

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        params = request.to_sampling_params(request.max_tokens, {})
        outputs = self.engine_client.generate(self._input(), params, "r")
        make = (
            self.chat_completion_stream_generator if request.stream else self.chat_completion_full_generator
        )
        response = make(request, outputs, "chatcmpl-r", "m", request.messages, TOKENIZER, _Metadata())
        return response if request.stream else await response


class FakeMessages(FakeChat, AnthropicServingMessages):
    """vLLM's Messages API over these chats."""

    _merge_inline_system = False
    _disabled_thinking_effort = "none"


def engine(client: FakeClient, created: int) -> VllmEngine:
    """Return our engine over these serving objects."""
    state = SimpleNamespace(
        openai_serving_completion=FakeCompletions(client, created),
        openai_serving_chat=FakeChat(client),
        anthropic_serving_messages=FakeMessages(client),
    )
    return VllmEngine(SimpleNamespace(engine=SimpleNamespace(_app_state=state)), "m")
