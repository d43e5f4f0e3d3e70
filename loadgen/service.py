"""The service under load, as its operator sees it: status, policy, and what its engines report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from offline.cli import BadInput

# Ray's names of the engines' counters -> ours
_TOTALS = {
    "ray_eldr_decode_step_experts_total": "active",
    "ray_eldr_decode_steps_total": "steps",
    "ray_eldr_decode_step_requests_total": "batch",
    "ray_eldr_decode_seconds_total": "seconds",
}
_STILL_S = 6  # engines report every few seconds


class Service:
    """A running application.

    Args:
        url: of its ingress.
        key: admin key, for set_policy.
        metrics: Ray metrics endpoints of the nodes with decode engines; without them nothing is known
            of active experts.
    """

    def __init__(self, url: str, key: str, metrics: Sequence[str] = ()) -> None:
        self.url = url.rstrip("/")
        self._metrics = list(metrics)
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
        """Sums over decode engines of what their steps reported; None if no metrics endpoint is known."""
        if not self._metrics:
            return None
        replicas = [f'"{worker["replica"]}"' for worker in self.status().get("workers", [])]
        totals = dict.fromkeys(_TOTALS.values(), 0.0)
        for url in self._metrics:
            answer = self._ask("GET", url)
            if answer.status_code != 200:
                raise BadInput(f"{url} answers {answer.status_code}, not metrics")
            for line in answer.text.splitlines():
                head, _, value = line.rpartition(" ")
                name = _TOTALS.get(head.partition("{")[0])
                if name and any(replica in head for replica in replicas):
                    totals[name] += float(value)
        return totals

    def settled_totals(self, *, at_rest: bool = False) -> dict[str, float] | None:
        """decode_totals once they stand still.

        Args:
            at_rest: nothing was sent since the last call, so what it returned needs no second look.
        """
        totals, still = self.decode_totals(), 0
        if at_rest and totals == self._settled:
            return totals
        while totals is not None and still < _STILL_S:
            time.sleep(1.0)
            newer = self.decode_totals()
            still = still + 1 if newer == totals else 0
            totals = newer
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
