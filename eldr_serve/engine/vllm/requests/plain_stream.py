"""The chunks of plain streams, made in a replica without pydantic but with the bytes of vLLM's server.

vLLM's own generator makes the first and last chunks of a stream, and one more with a marker as its text. This
chunk, split at the marker, is the template of all chunks in the middle. If the generator asks for another
output before it has made that chunk, it makes all chunks of its stream.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pydantic_core

from eldr_serve.request import has_several_prompts

_MARK = "\x00eldr\x00"
_MARK_JSON = pydantic_core.to_json(_MARK).decode()


def is_plain(serving: Any, request: Any) -> bool:
    """Return whether chunks in the middle of the stream differ from each other only in their text.

    Args:
        serving: vLLM's OpenAI serving object.
        request: ChatCompletionRequest or CompletionRequest.
    """
    options = request.stream_options
    return (
        (request.n or 1) == 1
        and not has_several_prompts(getattr(request, "prompt", None))
        and (request.logprobs is None or request.logprobs is False)  # in completions 0 asks for logprobs
        and not request.return_token_ids
        and not (options and options.continuous_usage_stats)
        and getattr(serving, "parser_cls", None) is None
        and not getattr(serving, "enable_log_outputs", False)
    )


class PlainStream:
    """A proxy of vLLM's generator of a stream, and of the engine's outputs that the generator reads.

    Args:
        generator: vLLM's generator.
        send: callback that receives the chunks made here.
    """

    def __init__(
        self, generator: Callable[..., AsyncGenerator[str, None]], send: Callable[[bytes], None]
    ) -> None:
        self._generator = generator
        self._send = send
        self._outputs: AsyncIterator[Any]
        self._marker: Any = None  # an output with the marker, until the generator reads it
        self._awaits_mark = False  # the generator has read the marker and not yet made its chunk
        self._may_learn = True  # False once the generator has asked for more without making that chunk
        self._template: tuple[bytes, bytes] | None = None
        self._uncounted: list[int] = []  # tokens that the generator has not seen

    async def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        """Yield the chunks that vLLM's generator makes; it takes the generator's arguments."""
        position = next(number for number, arg in enumerate(args) if hasattr(arg, "__anext__"))
        self._outputs = args[position]
        async for chunk in self._generator(*args[:position], self, *args[position + 1 :], **kwargs):
            head, mark, tail = chunk.partition(_MARK_JSON) if self._awaits_mark else ("", "", "")
            if not mark:
                yield chunk
                continue
            self._awaits_mark = False
            if self._may_learn:
                self._template = (head.encode(), tail.encode())

    def __aiter__(self) -> PlainStream:
        return self

    async def __anext__(self) -> Any:
        """Return the next output for vLLM's generator."""
        if self._marker is not None:
            marker, self._marker, self._awaits_mark = self._marker, None, True
            return marker
        if self._awaits_mark:
            self._may_learn = False
        while True:
            item = await anext(self._outputs)  # completions give a tuple of the prompt's index and the result
            result = item[1] if isinstance(item, tuple) else item
            output = result.outputs[0]
            if self._template is None or output.finish_reason is not None:
                break
            self._send(self._template[0] + pydantic_core.to_json(output.text) + self._template[1])
            self._uncounted += output.token_ids
        if output.finish_reason is not None:
            output.token_ids, self._uncounted = [*self._uncounted, *output.token_ids], []
        elif output.token_ids and self._may_learn:
            marked = copy.copy(result)
            marked.outputs = [replace(output, text=_MARK, token_ids=[])]
            self._marker = (item[0], marked) if isinstance(item, tuple) else marked
        return item
