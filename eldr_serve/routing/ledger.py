"""Live load, counted from what was dispatched and released; nobody is polled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from eldr_serve.routing.types import Loads


class LoadLedger:
    """Requests in flight and KV tokens (prompt + generated) of each worker, and what it has yet to prefill.

    A worker is any hashable name. Loads are never negative, and zero for an idle or unknown worker.
    """

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, int, int]] = {}  # id -> worker's place, prompt, generated
        self._place: dict[Hashable, int] = {}  # of every worker ever heard of
        self._lacking: dict[str, int] = {}  # id -> prompt tokens that its worker has yet to compute
        self._in_flight = np.zeros(16, np.int64)
        self._kv_tokens = np.zeros(16, np.int64)
        self._prefill_tokens = np.zeros(16, np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, worker: Hashable, prompt_tokens: int) -> None:
        """The request runs on `worker` from now on; one that ran elsewhere leaves there."""
        self.release(request_id)
        place = self._place_of(worker)
        self._requests[request_id] = (place, prompt_tokens, 0)
        self._in_flight[place] += 1
        self._kv_tokens[place] += prompt_tokens

    def prefills(self, request_id: str, tokens: int) -> None:
        """The request's worker computes so many tokens of its prompt first; its first token ends that."""
        held = self._requests.get(request_id)
        if held is not None:
            self._prefilled(request_id)
            self._lacking[request_id] = tokens
            self._prefill_tokens[held[0]] += tokens

    def _prefilled(self, request_id: str) -> None:
        tokens = self._lacking.pop(request_id, None)
        if tokens is not None:
            self._prefill_tokens[self._requests[request_id][0]] -= tokens

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """The request has generated so many tokens in all; unknown requests and steps back are ignored."""
        held = self._requests.get(request_id)
        if held is None or generated_tokens <= held[2]:
            return
        self._prefilled(request_id)
        place, prompt_tokens, before = held
        self._requests[request_id] = (place, prompt_tokens, generated_tokens)
        self._kv_tokens[place] += generated_tokens - before

    def release(self, request_id: str) -> None:
        """The request no longer runs; a second release does nothing."""
        self._prefilled(request_id)
        held = self._requests.pop(request_id, None)
        if held is None:
            return
        place, prompt_tokens, generated = held
        self._in_flight[place] -= 1
        self._kv_tokens[place] -= prompt_tokens + generated
        assert self._in_flight[place] >= 0
        assert self._kv_tokens[place] >= 0

    def places(self, workers: Iterable[Hashable]) -> NDArray[np.int64]:
        """int64[W], what `loads` takes for these workers, now and later."""
        return np.array([self._place_of(worker) for worker in workers], np.int64)

    def loads(self, places: NDArray[np.int64], available: NDArray[np.bool_] | None = None) -> Loads:
        """A copy of the loads of those workers; None: all are available."""
        if available is None:
            available = np.ones(len(places), bool)
        return Loads(
            self._in_flight[places], self._kv_tokens[places], available, self._prefill_tokens[places]
        )

    def _place_of(self, worker: Hashable) -> int:
        place = self._place.setdefault(worker, len(self._place))
        if place == len(self._in_flight):
            for column in ("_in_flight", "_kv_tokens", "_prefill_tokens"):
                values = getattr(self, column)
                setattr(self, column, np.append(values, np.zeros_like(values)))
        return place
