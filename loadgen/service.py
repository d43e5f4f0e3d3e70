"""The service under load, as its operator sees it: status, policy, and what its engines report."""

from __future__ import annotations

import time
from typing import Any

import httpx

from tools.cli import BadInput

# Names in the status -> in trials
_TOTALS = {"steps": "steps", "requests": "batch", "active_experts": "active", "seconds": "seconds"}
_STILL_S = 3.0  # decode replicas report their steps every second


class Service:
    """A running application.

    Args:
        url: of its ingress.
        key: admin key, for set_policy.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._settled: dict[str, float] | None = None
        self._http = httpx.Client(timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {})

    def status(self) -> dict[str, Any]:
        """GET /eldr/status; BadInput if nothing of ours answers."""
        answer = self._ask("GET", f"{self.url}/eldr/status")
        try:
            status: dict[str, Any] = answer.raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise BadInput(f"{self.url} does not answer as eldr-serve: {error}") from error
        return status

    def set_policy(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        """Change the policy; BadInput with the server's own sentence if it refuses."""
        body = {"name": name, "parameters": parameters or {}}
        answer = self._ask("PUT", f"{self.url}/eldr/policy", json=body)
        if answer.status_code != 200:
            raise BadInput(f"{self.url} refused policy {name}: {_sentence(answer)}")

    def wait_idle(self, timeout_s: float = 300.0) -> None:
        """Until no request holds a lease; BadInput if that does not come."""
        deadline = time.monotonic() + timeout_s
        while self.status().get("leases", 0):
            if time.monotonic() > deadline:
                raise BadInput(f"requests are still running on {self.url} after {timeout_s:.0f} s")
            time.sleep(0.2)

    def decode_totals(self) -> dict[str, float] | None:
        """Sums over all decode steps that engines have reported; None while the router does not know them.

        `steps`; `batch`, requests; `active`, experts, mean over layers; `seconds`.
        """
        totals = self.status().get("decode_totals")
        return totals and {ours: totals[theirs] for theirs, ours in _TOTALS.items()}

    def settled_totals(self, *, at_rest: bool = False) -> dict[str, float] | None:
        """decode_totals once they stand still.

        Args:
            at_rest: nothing was sent since the last call, so what it returned needs no second look.
        """
        totals, since = self.decode_totals(), time.monotonic()
        if at_rest and totals == self._settled:
            return totals
        while totals is not None and time.monotonic() - since < _STILL_S:
            time.sleep(0.5)
            newer = self.decode_totals()
            if newer != totals:
                totals, since = newer, time.monotonic()
        self._settled = totals
        return totals

    def _ask(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        try:
            return self._http.request(method, url, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadInput(f"{url} cannot be reached: {error}") from error


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"
