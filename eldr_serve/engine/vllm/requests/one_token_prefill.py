"""The prefill of a prompt in a replica: all of vLLM's checks of the request, but only one generated token."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from eldr_serve.channel import CallFailedError
from eldr_serve.engine.vllm.compat.serve_llm import openai_serving, wrap_client
from eldr_serve.engine.vllm.requests.answer_forms import answer_form
from eldr_serve.engine.vllm.requests.continuation import prompt_with_generated


class _PromptKnownError(BaseException):
    """Ends vLLM's work on an answer as soon as its prompt is known.

    It is not an Exception, because vLLM catches every Exception.
    """


class _OneTokenClient:
    """A proxy of a vLLM engine client whose `generate` checks the request and generates one token.

    Args:
        client: vLLM's client of the engine.
        generated: tokens that another engine generated from the prompt, appended to it.
        stops_when_prompt_is_known: `generate` raises _PromptKnownError, because vLLM would read its result at
            once.

    Attributes:
        outputs: result of the last `generate`; None before the first.
    """

    def __init__(self, client: Any, generated: list[int], *, stops_when_prompt_is_known: bool) -> None:
        self._client = client
        self._generated = generated
        self._stops_when_prompt_is_known = stops_when_prompt_is_known
        self.outputs: AsyncGenerator[Any, None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        self.outputs = self._generate(prompt, sampling_params, request_id, kwargs)
        if self._stops_when_prompt_is_known:
            raise _PromptKnownError
        return self.outputs

    async def _generate(
        self, prompt: Any, params: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        client = self._client
        options = {name: kwargs.get(name) for name in ("lora_request", "priority", "data_parallel_rank")}
        client.input_processor.process_inputs(
            request_id, prompt, params, await client.get_supported_tasks(), **options
        )
        # Blocks are handed over only if the request ends by its length, so no token may end it.
        one_token = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=params.extra_args,
        )
        prompt = prompt_with_generated(prompt, self._generated)
        async for output in client.generate(prompt, one_token, request_id, **kwargs):
            yield output


async def prefill_prompt(
    engine: Any, method: str, request: Any, raw_request: Any, generated: list[int]
) -> Any:
    """Prefill a prompt; return vLLM's output, without text but with token ids and `kv_transfer_params`.

    The prompt is rendered from the whole request, as the decode engine would render it, since a chat
    template may insert tools, tool choice and response format. A request that vLLM refuses is refused here
    with vLLM's message, before any step runs.

    Args:
        engine: Ray's VLLMEngine.
        method: "chat", "completions", "messages" or "responses".
        request: the client's request, with `kv_transfer_params` for the hand-over.
        raw_request: a Starlette request with the client's headers, or None.
        generated: tokens that another engine generated from the prompt, appended to it.

    Raises:
        CallFailedError: vLLM refuses the request.
    """
    serving, create = openai_serving(engine, method)
    # A lazy method calls `generate` at once only for an answer that is not a stream.
    is_lazy = answer_form(method).is_lazy
    serving, client = wrap_client(
        serving, lambda client: _OneTokenClient(client, generated, stops_when_prompt_is_known=is_lazy)
    )
    answer: Any = None
    with suppress(_PromptKnownError):
        # The streams of other methods are returned before they begin and never read, so no answer is made.
        request = request.model_copy(update={"stream": not is_lazy})
        answer = await getattr(serving, create)(request, raw_request)
    if client.outputs is None:
        raise CallFailedError(int(answer.error.code), answer.model_dump_json().encode())
    last: Any = None
    async for output in client.outputs:
        last = output
    return last
