"""Live load, counted from what was dispatched and released; nobody is polled."""

from __future__ import annotations

from collections.abc import Hashable

from eldr_serve.routing.types import WorkerLoad


class LoadLedger:
    """Requests in flight and KV tokens (prompt + generated) of each worker.

    A worker is any hashable name. Loads are never negative, and zero for an idle or unknown worker.
    """

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Hashable, int, int]] = {}  # id -> worker, prompt, generated
        self._in_flight: dict[Hashable, int] = {}
        self._kv_tokens: dict[Hashable, int] = {}
        self._loads: dict[Hashable, WorkerLoad] = {}  # made when asked for, until something changes

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, worker: Hashable, prompt_tokens: int) -> None:
        """The request runs on `worker` from now on; one that ran elsewhere leaves there."""
        self.release(request_id)
        self._requests[request_id] = (worker, prompt_tokens, 0)
        self._loads.pop(worker, None)
        self._in_flight[worker] = self._in_flight.get(worker, 0) + 1
        self._kv_tokens[worker] = self._kv_tokens.get(worker, 0) + prompt_tokens

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """The request has generated so many tokens in all; unknown requests and steps back are ignored."""
        held = self._requests.get(request_id)
        if held is None or generated_tokens <= held[2]:
            return
        worker, prompt_tokens, before = held
        self._requests[request_id] = (worker, prompt_tokens, generated_tokens)
        self._loads.pop(worker, None)
        self._kv_tokens[worker] += generated_tokens - before

    def release(self, request_id: str) -> None:
        """The request no longer runs; a second release does nothing."""
        held = self._requests.pop(request_id, None)
        if held is None:
            return
        worker, prompt_tokens, generated = held
        self._loads.pop(worker, None)
        self._in_flight[worker] -= 1
        self._kv_tokens[worker] -= prompt_tokens + generated
        assert self._in_flight[worker] >= 0
        assert self._kv_tokens[worker] >= 0
        if not self._in_flight[worker]:
            del self._in_flight[worker], self._kv_tokens[worker]

    def load(self, worker: Hashable, *, available: bool = True) -> WorkerLoad:
        """The load of one worker."""
        load = self._loads.get(worker)
        if load is None or load.available != available:
            load = WorkerLoad(self._in_flight.get(worker, 0), self._kv_tokens.get(worker, 0), available)
            self._loads[worker] = load
        return load
