"""The estimated number of tokens of a prompt that is not tokenised yet."""

from __future__ import annotations

from typing import Any

_CHARACTERS_PER_TOKEN = 4.0  # assumed ratio until prompts have been counted
_TIME_CONSTANT = 100  # prompts over which the mean is taken


class PromptSizes:
    """Estimates a prompt's tokens from the mean number of characters per token of earlier prompts."""

    def __init__(self) -> None:
        self._characters, self._tokens = 1000 * _CHARACTERS_PER_TOKEN, 1000.0

    def estimate(self, prompt: Any, messages: Any) -> float:
        """Estimate the number of tokens of a completion's prompts or a chat's messages; at least 1."""
        match prompt:
            case [int(), *_]:
                return float(len(prompt))
            case [list(), *_]:  # several prompts of token ids
                return max(1.0, float(sum(len(ids) for ids in prompt if isinstance(ids, list))))
        return max(1.0, _num_characters(prompt, messages) * self._tokens / self._characters)

    def learn(self, prompt: Any, messages: Any, tokens: int) -> None:
        """Learn from a prompt or chat with this true number of tokens; ignore it if it has no text."""
        characters = _num_characters(prompt, messages)
        if characters:
            weight = 1 - 1 / _TIME_CONSTANT
            self._characters = weight * self._characters + characters
            self._tokens = weight * self._tokens + tokens


def _num_characters(prompt: Any, messages: Any) -> int:
    """Return the total length of all strings in a prompt or in the texts of messages."""
    pending, total = [prompt if messages is None else messages], 0
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += [item[key] for key in ("content", "text") if key in item]
    return total
