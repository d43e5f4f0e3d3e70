"""Loads of the decode workers over the next steps, from the requests that run (paper, section C.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_START_ROWS = 64
_NEVER = np.iinfo(np.int32).max  # an age that no request reaches


@dataclass(frozen=True)
class Ran:
    """A request that no longer runs."""

    key: str | None
    prompt_tokens: int
    generated_tokens: int


class RunningRequests:
    """The requests on all workers, one row each, with how many tokens each still has to go.

    The remaining tokens r of a request, in [1, H], are those last set, less one for each token
    generated since. A request that was expected to outlast the horizon keeps r = H: H less the tokens
    since would have it leave just beyond the next H - R steps, which nobody expects.

    Args:
        horizon: H, decode steps.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self._row: dict[str, int] = {}
        self.ids: list[str] = []
        self.keys: list[str | None] = []
        self._columns = np.zeros((6, _START_ROWS), np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row

    # Each is int64[n], a view.
    @property
    def worker(self) -> NDArray[np.int64]:
        return self._columns[0, : len(self)]

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        return self._columns[1, : len(self)]

    @property
    def age(self) -> NDArray[np.int64]:
        """Tokens generated."""
        return self._columns[2, : len(self)]

    @property
    def _last(self) -> NDArray[np.int64]:
        """Age at which the request must end: its limit of new tokens."""
        return self._columns[3, : len(self)]

    @property
    def _asked(self) -> NDArray[np.int64]:
        """Age when r was last set; -1 if never."""
        return self._columns[4, : len(self)]

    @property
    def _end(self) -> NDArray[np.int64]:
        """Age at which the request ends, as far as was known then."""
        return self._columns[5, : len(self)]

    def add(
        self,
        request_id: str,
        worker: int,
        prompt_tokens: int,
        *,
        max_new_tokens: int,
        key: str | None,
        age: int = 0,
    ) -> None:
        """The request runs on `worker`; until r is set, it is `horizon`. One that ran elsewhere leaves."""
        self.remove(request_id)
        row = len(self.ids)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        last = max_new_tokens if max_new_tokens > 0 else _NEVER
        self._columns[:, row] = (worker, prompt_tokens, age, last, -1, _NEVER)
        self._row[request_id] = row
        self.ids.append(request_id)
        self.keys.append(key)

    def remove(self, request_id: str) -> Ran | None:
        """Forget the request; None if it was not known."""
        row = self._row.pop(request_id, None)
        if row is None:
            return None
        ran = Ran(self.keys[row], int(self.prompt_tokens[row]), int(self.age[row]))
        last = len(self.ids) - 1
        self._columns[:, row] = self._columns[:, last]
        request, key = self.ids.pop(), self.keys.pop()
        if row != last:
            self.ids[row], self.keys[row], self._row[request] = request, key, row
        return ran

    def progress(self, generated_tokens: Mapping[str, int]) -> None:
        """So many tokens in all, by request id; unknown ones are ignored."""
        rows = [(self._row[r], tokens) for r, tokens in generated_tokens.items() if r in self._row]
        if rows:
            changed = np.array(rows, np.int64)
            self.age[changed[:, 0]] = changed[:, 1]

    def stale(self, refresh: int) -> NDArray[np.int64]:
        """Rows whose r was never set, was set `refresh` tokens ago or has run out (section C.2.3)."""
        asked, age = self._asked, self.age
        return np.flatnonzero((asked < 0) | (age - asked >= refresh) | (age >= self._end))

    def set_remaining(self, rows: NDArray[np.int64], remaining: NDArray[np.float64]) -> None:
        """Set r of rows[k], clipped to [1, H] and to what the request may still generate."""
        age = self.age[rows]
        left = np.maximum(np.rint(remaining), 1)
        left = np.minimum(np.where(left >= self.horizon, _NEVER, left), self._last[rows] - age)
        self._asked[rows] = age
        self._end[rows] = age + np.maximum(left, 1).astype(np.int64)

    @property
    def remaining(self) -> NDArray[np.int64]:
        """r, int64[n] in [1, H]."""
        return np.clip(self._end - self.age, 1, self.horizon)

    def project(self, num_workers: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """KV tokens of each worker h steps ahead, and its requests now.

        A request contributes prompt + generated + h at h = 0 .. r, then nothing.

        Returns:
            (float64[W, H+1], int64[W]); workers from `num_workers` on are left out.
        """
        steps = self.horizon + 1
        # One cell for each worker and r, then summed from the far end: who is still there at h.
        cell = self.worker * steps + self.remaining
        inside = self.worker < num_workers
        cell, kv = cell[inside], (self.prompt_tokens + self.age)[inside]
        shape = (num_workers, steps)
        tokens = np.bincount(cell, kv, minlength=num_workers * steps).reshape(shape)
        requests = np.bincount(cell, minlength=num_workers * steps).reshape(shape)
        alive = requests[:, ::-1].cumsum(axis=1)[:, ::-1]
        loads = tokens[:, ::-1].cumsum(axis=1)[:, ::-1] + np.arange(float(steps)) * alive
        return loads, alive[:, 0]
