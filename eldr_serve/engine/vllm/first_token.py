"""The prefill call: all of vLLM's checks of the client's request, then one token in place of its answer."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from eldr_serve.channel import CallFailed
from eldr_serve.engine.vllm.compat.serve_llm import openai_serving
from eldr_serve.engine.vllm.continuation import begun_prompt


class _Engine:
    """Stands before a vLLM engine client: `generate` checks what it is asked for and makes one token."""

    def __init__(self, client: Any, generated: list[int]) -> None:
        self._client = client
        self._generated = generated
        self.output: AsyncGenerator[Any, None] | None = None  # of the last `generate`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        self.output = self._generate(prompt, sampling_params, request_id, kwargs)
        return self.output

    async def _generate(
        self, prompt: Any, asked: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        client = self._client
        checked = {name: kwargs.get(name) for name in ("lora_request", "priority", "data_parallel_rank")}
        client.input_processor.process_inputs(
            request_id, prompt, asked, await client.get_supported_tasks(), **checked
        )
        # Whatever the token is, the request must end for its length: only then are its blocks handed over.
        one = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=asked.extra_args,
        )
        prompt = begun_prompt(prompt, self._generated)
        async for output in client.generate(prompt, one, request_id, **kwargs):
            yield output


async def first_token(engine: Any, method: str, request: Any, raw_request: Any, generated: list[int]) -> Any:
    """vLLM's output of the prompt: without text, but with its token ids and `kv_transfer_params`.

    The prompt is rendered from the whole request, as the decode engine would render it: a chat template
    may write tools, tool choice and response format into it. A request that vLLM refuses is refused
    here with the same words, before it has cost a step.

    Args:
        engine: Ray's VLLMEngine.
        method: "chat" or "completions".
        request: the client's, with the hand-over's `kv_transfer_params`.
        raw_request: with the client's headers.
        generated: tokens that another engine has made of the prompt, which follow it.

    Raises:
        CallFailed: vLLM refuses the request.
    """
    serving, create = openai_serving(engine, method)
    serving = copy.copy(serving)
    serving.engine_client = client = _Engine(serving.engine_client, generated)
    # A stream is returned before it is begun, and then is not: nothing of the answer is made.
    answer = await getattr(serving, create)(request.model_copy(update={"stream": True}), raw_request)
    if client.output is None:
        raise CallFailed(int(answer.error.code), answer.model_dump_json().encode())
    last: Any = None
    async for output in client.output:
        last = output
    return last
