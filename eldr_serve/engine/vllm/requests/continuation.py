"""The continuation of an answer on another engine, after the engine that began it was lost.

This module runs in the replica. The ingress receives the ids of generated tokens with the bytes made from
them. If the engine is lost, another engine can therefore compute the prompt and these ids as one prompt.
There vLLM's output processor first replays the ids; their output is dropped, because it was already sent.
Then it processes the new tokens. In this way buffered text, stop strings, log-probabilities, usage and finish
reasons are the same as from a single engine.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType

from eldr_serve.engine.calls import CREATED_TOKENS_KEY
from eldr_serve.engine.protocol import Send
from eldr_serve.engine.vllm.compat.serve_llm import (
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
    OutputProcessor,
)

_CREATED = re.compile(rb'"created":\d+')  # in generated text the quotes are escaped
_FINISH_REASONS = {str(reason): reason for reason in FinishReason}
_TOKENS_PER_FRAME = 8  # tokens of a frame in an unstreamed answer; its bytes are in the last one
_REPLAY_BATCH = 32  # tokens to replay before yielding to the event loop


def prompt_with_generated(prompt: Any, generated: list[int]) -> Any:
    """Return vLLM's input for the prompt followed by the tokens generated from it."""
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *generated]} if generated else prompt


def is_resumable(params: SamplingParams, *, stream: bool) -> bool:
    """Return whether another engine can generate the rest of an answer from the prompt and the generated ids.

    It cannot if the generator is seeded, since the generator's state is lost, or if a parameter treats prompt
    and generated tokens differently. The log-probabilities of an unstreamed answer would be lost.
    """
    return (
        params.sampling_type is not SamplingType.RANDOM_SEED
        and not (params.presence_penalty or params.frequency_penalty or params.bad_words)
        and params.structured_outputs is None
        and params.prompt_logprobs is None
        and params.prompt_logprob_token_ids is None
        and params.logprob_token_ids is None
        and params.repetition_detection is None
        and params.thinking_token_budget is None
        and (params.logprobs is None or (stream and params.logprobs >= 0))
        and not (params.extra_args or {}).keys() - {"kv_transfer_params"}
    )


class Continuation:
    """A proxy of a vLLM engine client, which also receives the bytes that a serving object makes.

    A frame holds the ids of one output's tokens and the bytes made from them, so that an answer that is cut
    has both or neither. The last frame also holds the bytes that follow the last token.

    Args:
        client: vLLM's client of the engine.
        send: callback that receives the frames.
        request: vLLM's request for one answer to one prompt.
        generated: ids that another engine generated and the ingress received.
        created: timestamp in the chunks that were already sent, in seconds since 1970; None if none were.
        random_ids: parts of the answer have random ids, so no other engine can continue it.

    Attributes:
        failure: the engine's error, even if the serving object has handled it; None if there is none.
        metrics: vLLM's RequestStateStats; set at the end of the answer, if there are any.
        prompt_token_ids: set at the end of the answer.
        cached_tokens: number of tokens in the engine's prefix cache; set at the end of the answer.
        counts: fields that EldrConnector added to the answer; set at its end, and hidden from clients.
    """

    def __init__(
        self,
        client: Any,
        send: Send,
        request: Any,
        generated: list[int],
        created: int | None,
        *,
        random_ids: bool = False,
    ) -> None:
        self._client = client
        self._send = send
        self._stream = bool(request.stream)
        # vLLM gives tool calls random ids too.
        self._random_ids = random_ids or bool(getattr(request, "tools", None))
        self._generated = generated
        self._created = None if created is None else b'"created":%d' % created
        self._is_replaying = bool(generated)
        self._sends_ids = False
        self._bytes: list[bytes] = []
        self._ids: list[int] = []
        self.failure: Exception | None = None
        self.metrics: Any = None
        self.prompt_token_ids: list[int] = []
        self.cached_tokens = 0
        self.counts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def write(self, part: bytes) -> None:
        """Buffer bytes made from the newest output; they are sent when the next output is requested."""
        self._bytes.append(part)

    def _flush(self) -> None:
        payload, ids = b"".join(self._bytes), self._ids
        self._bytes, self._ids = [], []
        if self._is_replaying or not (payload or ids):
            return
        if self._created is not None:
            payload = _CREATED.sub(self._created, payload)
        self._send(payload, len(ids), array("I", ids).tobytes() if self._sends_ids else b"")

    def end(self, part: bytes = b"") -> None:
        """Send the last frame; raise the engine's error if it has failed."""
        if self.failure is not None:
            raise self.failure
        self.write(part)
        self._is_replaying = False
        self._flush()

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate as the client does; an unstreamed answer is yielded once, at its end."""
        one_prompt = isinstance(prompt, dict) and "prompt_token_ids" in prompt
        self._sends_ids = one_prompt and not self._random_ids and is_resumable(params, stream=self._stream)
        if not self._stream:
            params = params.clone()
            params.output_kind = RequestOutputKind.DELTA
            params.stream_interval = max(params.stream_interval or 1, _TOKENS_PER_FRAME)
        # If the prompt's blocks come from a prefill engine, the prompt was written to that engine's cache.
        transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
        created = transfer.get(CREATED_TOKENS_KEY)
        generate = self._resume if self._generated else self._client.generate
        unstreamed_answer: Any = None
        output: Any = None
        try:
            async with aclosing(generate(prompt, params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    if created is not None:
                        output.num_cache_creation_tokens = created
                    self._ids += completion.token_ids
                    if output.kv_transfer_params:
                        self.counts, output.kv_transfer_params = output.kv_transfer_params, None
                    if completion.finish_reason == "error":
                        self.failure = RuntimeError("the engine failed this request")
                    if self._stream:
                        yield output
                    elif unstreamed_answer is None:
                        unstreamed_answer = output
                    else:
                        unstreamed_answer.add(output, aggregate=True)
                    if not output.finished:  # the serving object has processed this output completely
                        self._flush()
        except Exception as error:
            self.failure = error
            raise
        finally:
            # The engine has received the request and will free the prompt's blocks. Otherwise vLLM's server
            # would notify the prefill engine a second time if the client disconnects early.
            transfer["do_remote_prefill"] = False
        self.metrics = getattr(output, "metrics", None)
        self.prompt_token_ids = getattr(output, "prompt_token_ids", None) or []
        self.cached_tokens = getattr(output, "num_cached_tokens", None) or 0
        if unstreamed_answer is not None:
            yield unstreamed_answer

    async def _resume(
        self, prompt: Any, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Replay the generated ids, then generate the rest; yield the outputs of both."""
        client, generated = self._client, self._generated
        replay_params = params.clone()
        replay_params.stream_interval = None  # the lost engine made bytes from each of the ids
        request = client.input_processor.process_inputs(
            request_id, prompt, replay_params, await client.get_supported_tasks()
        )
        request.external_req_id = request_id
        processor = OutputProcessor(client.renderer.tokenizer, log_stats=False)
        processor.add_request(request, prompt.get("prompt"))
        for number, token in enumerate(generated):
            core = EngineCoreOutput(request_id, [token])
            if params.logprobs is not None:
                core.new_logprobs = _no_logprobs(token)
            for output in processor.process_outputs([core]).request_outputs:
                yield output
            if number % _REPLAY_BATCH == _REPLAY_BATCH - 1:
                await asyncio.sleep(0)
        rest_params = params.clone()
        if params.max_tokens is not None:
            rest_params.max_tokens = max(params.max_tokens - len(generated), 1)
        rest_params.min_tokens = max(params.min_tokens - len(generated), 0)
        rest_params.stop, rest_params.detokenize, rest_params.output_text_buffer_length = [], False, 0
        rest_params.output_kind = RequestOutputKind.DELTA
        whole_prompt = prompt_with_generated(prompt, generated)
        stream = client.generate(whole_prompt, rest_params, request_id, **kwargs)
        async with aclosing(stream) as outputs:
            async for result in outputs:
                self._is_replaying = False
                core = _core_output(result.outputs[0], request_id, params)
                processed = processor.process_outputs([core])
                for output in processed.request_outputs:
                    output.num_cached_tokens = result.num_cached_tokens
                    yield output
                if processed.reqs_to_abort:  # a stop string, which the engine does not look for
                    return


def _no_logprobs(token: int) -> LogprobsLists:
    return LogprobsLists(np.array([[token]]), np.zeros((1, 1)), np.array([1]))


def _core_output(output: Any, request_id: str, params: SamplingParams) -> EngineCoreOutput:
    """Rebuild the engine core's output from vLLM's output without text."""
    core = EngineCoreOutput(request_id, list(output.token_ids), stop_reason=output.stop_reason)
    if output.finish_reason is not None:
        core.finish_reason = _FINISH_REASONS[output.finish_reason]
    if output.logprobs:
        rows = [_logprob_row(logprobs, params.logprobs or 0) for logprobs in output.logprobs]
        core.new_logprobs = LogprobsLists(
            np.array([[token for token, _ in row] for row in rows]),
            np.array([[logprob.logprob for _, logprob in row] for row in rows]),
            np.array([row[0][1].rank for row in rows]),
        )
    return core


def _logprob_row(logprobs: dict[int, Any], top: int) -> list[tuple[int, Any]]:
    """Return the sampled token, followed by the `top` most likely tokens, which may include it again."""
    sampled, *others = logprobs.items()
    if len(others) < top:
        others.insert(sampled[1].rank - 1, sampled)
    return [sampled, *others]
