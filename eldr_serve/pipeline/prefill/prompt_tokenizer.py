"""Tokenisation of prompts in the ingress, for predictions before an engine has the prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.request import RequestFields, conversation, has_several_prompts

logger = logging.getLogger(__name__)

_MAX_CHARACTERS_IN_LOOP = 4096  # maximum characters of a prompt that is tokenised without a thread


class PromptTokenizer:
    """The served model's tokenizer, loaded in the ingress.

    The ids of a chat come from the texts of its messages, without the chat template, because predictions
    depend on how often each token occurs, and the template's tokens occur in every prompt.

    Args:
        source: folder with the model's tokenizer.json, or the model's name on the hub.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokenizer: Tokenizer | None = None

    async def fingerprint(self) -> str:
        """Return the fingerprint of the tokenizer (see tokenizer_fingerprint); load it if needed.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._load)
        return await asyncio.to_thread(tokenizer_fingerprint, self._tokenizer.get_vocab())

    async def size(self) -> int:
        """Return the number of token ids, one more than the largest id; load the tokenizer if needed."""
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(self._load)
        return 1 + max(self._tokenizer.get_vocab().values())

    def _load(self) -> Tokenizer:
        folder = Path(self._source)
        try:
            if folder.is_dir():
                return Tokenizer.from_file(str(folder / "tokenizer.json"))
            return Tokenizer.from_pretrained(self._source)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"the tokenizer of {self._source} cannot be read: {error}") from error

    async def add_ids_to(self, context: RequestContext) -> None:
        """Tokenise the prompt of a request whose token ids are unknown, and set `tokenised_ids`."""
        if context.prompt_ids is None:
            context.tokenised_ids = await self.tokenise(context.request.fields)

    async def tokenise(self, fields: RequestFields) -> NDArray[np.uint32] | None:
        """Return the token ids, uint32[n]; None for several prompts, embeddings or an unloaded tokenizer."""
        messages = conversation(fields) if fields.prompt is None else None
        if isinstance(messages, list):
            text, special = "\n".join(_message_texts(messages)), False
        elif isinstance(fields.prompt, str):
            text, special = fields.prompt, True
        else:
            return _parse_token_ids(fields.prompt)
        if self._tokenizer is None or not text:
            return None
        if len(text) > _MAX_CHARACTERS_IN_LOOP:
            return await asyncio.to_thread(self._encode, text, special)
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> NDArray[np.uint32]:
        assert self._tokenizer is not None
        encoded = self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=special)
        return np.array(encoded.ids, np.uint32)


def _parse_token_ids(prompt: Any) -> NDArray[np.uint32] | None:
    """Return the ids of a prompt that consists of token ids."""
    if not isinstance(prompt, list) or not prompt or has_several_prompts(prompt):
        return None
    try:
        return np.array(prompt, np.uint32)
    except (TypeError, ValueError, OverflowError):  # the engine reports what is wrong with them
        return None


def _message_texts(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"]
                for part in content
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
