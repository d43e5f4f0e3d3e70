"""HTTP client for operators of a running service: status, policy, artifacts and decode totals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import httpx

from eldr_serve.errors import UserInputError

_SLOW_CALL_TIMEOUT_S = 600.0  # for example engines are swapped one after the other, between decode steps
_DRAIN_POLL_S = 0.5  # a shorter period would fill the audit log, where each request is a line
_STABLE_S = 3.0  # decode replicas report their steps every second


class ServiceError(UserInputError):
    """The service cannot be reached or refuses a request; the message is one sentence."""


class OperatorClient:
    """Client of a running application; each call raises ServiceError if it fails or is refused.

    Args:
        url: URL of the ingress.
        admin_key: needed for all changes and for the complete status.
        timeout_s: timeout of each call, s.
    """

    def __init__(self, url: str, admin_key: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._final_totals: dict[str, float] | None = None
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._http = httpx.Client(timeout=timeout_s, headers=headers)

    def status(self) -> dict[str, Any]:
        """Return the answer of GET /eldr/status."""
        return self._request_json("GET", "/eldr/status")

    def router_value(self, key: str) -> Any:
        """Return a value of the router's status; raise ServiceError if it is not there."""
        status = self.status()
        if key not in status:
            raise ServiceError(
                f"the status of {self.url} has no {key}: the router is unreachable, or the admin key is wrong"
            )
        return status[key]

    def model(self) -> str:
        """Return the id of the first model of GET /v1/models."""
        try:
            return str(self._request_json("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"{self.url} names no model under /v1/models") from None

    def num_workers(self) -> int:
        """Return the number of decode workers; this works without the admin key."""
        status = self.status()
        return len(status["workers"]) if "workers" in status else int(status.get("decode_replicas", 0))

    def set_policy(self, name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Change the policy; return the new live settings."""
        return self._request_json("PUT", "/eldr/policy", json={"name": name, "parameters": parameters or {}})

    def set_shadow(self, name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """Compare the live policy with this one; return the new live settings."""
        return self._request_json("PUT", "/eldr/shadow", json={"name": name, "parameters": parameters or {}})

    def swap_table(self, table: bytes) -> dict[str, Any]:
        """Swap the table, given as the content of a RoutingTable file; return the new live settings."""
        return self._request_json("PUT", "/eldr/table", content=table)

    def table(self) -> bytes:
        """Return the live routing table as a RoutingTable file; raise ServiceError if there is none."""
        return self._request("GET", "/eldr/table").content

    def refit(self) -> dict[str, Any]:
        """Fit a table to recent traffic and swap it in; return its entry in the status."""
        entry: dict[str, Any] = self._request_json("PUT", "/eldr/refit", timeout=_SLOW_CALL_TIMEOUT_S)[
            "table"
        ]
        return entry

    def trace(self) -> bytes:
        """Return recent traffic as a CalibrationTrace file."""
        return self._request("GET", "/eldr/trace", timeout=_SLOW_CALL_TIMEOUT_S).content

    def swap_predictor(self, predictor: bytes) -> dict[str, Any]:
        """Swap the predictor, given as the content of a SignaturePredictor file; return the live settings."""
        return self._request_json("PUT", "/eldr/predictor", content=predictor)

    def place_experts(
        self, placement: bytes, sidecar: bytes, replicas: list[str] | None = None
    ) -> dict[str, Any]:
        """Change the expert placement of decode engines; return the cost of each replica's swap.

        Args:
            placement: content of an ExpertPlacement file.
            sidecar: content of the `.meta.json` file beside it.
            replicas: names of decode replicas as in the status; None: all.
        """
        body = {"map": json.loads(placement), "meta": json.loads(sidecar), "replicas": replicas}
        return self._request_json("PUT", "/eldr/experts", json=body, timeout=_SLOW_CALL_TIMEOUT_S)

    def drain(self, replica: str, timeout_s: float) -> dict[str, Any]:
        """Drain a decode replica and wait until it has no calls, at most `timeout_s`.

        Returns:
            `replica`, and `in_flight`: the calls that still run there.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            answer = self._request_json("PUT", "/eldr/drain", json={"replica": replica})
            if not answer.get("in_flight") or time.monotonic() >= deadline_s:
                return answer
            time.sleep(_DRAIN_POLL_S)

    def wait_idle(self, timeout_s: float = 300.0) -> None:
        """Wait until no request holds a lease; raise ServiceError if the status does not say."""
        deadline_s = time.monotonic() + timeout_s
        while self.router_value("leases"):
            if time.monotonic() > deadline_s:
                raise ServiceError(f"requests are still running on {self.url} after {timeout_s:.0f} s")
            time.sleep(0.2)

    def decode_totals(self, status: dict[str, Any] | None = None) -> dict[str, float] | None:
        """Return sums over all reported decode steps; None while there are no reports.

        Keys: `steps`, `requests`, `active_experts` (mean over layers), `seconds` and `token_seconds`, the
        sum of seconds times requests.

        Args:
            status: status to read the sums from; by default the current one.
        """
        totals: dict[str, float] | None = (self.status() if status is None else status).get("decode_totals")
        return totals

    def wait_for_final_totals(self, *, at_rest: bool = False) -> dict[str, float] | None:
        """Wait until decode_totals no longer change, and return them.

        Args:
            at_rest: no request was sent since the last call, so totals equal to its result are final.
        """
        totals, stable_since_s = self.decode_totals(), time.monotonic()
        if at_rest and totals == self._final_totals:
            return totals
        while totals is not None and time.monotonic() - stable_since_s < _STABLE_S:
            time.sleep(0.5)
            newer = self.decode_totals()
            if newer != totals:
                totals, stable_since_s = newer, time.monotonic()
        self._final_totals = totals
        return totals

    def _request_json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        answer = self._request(method, path, **kwargs)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise self._unexpected(answer)
        return content

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        url = f"{self.url}{path}"
        try:
            answer = self._http.request(method, url, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(f"{url} cannot be reached: {error}") from error
        if answer.is_success:
            return answer
        try:
            sentence = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise self._unexpected(answer) from None
        raise ServiceError(f"{self.url} refuses: {sentence}")

    def _unexpected(self, answer: httpx.Response) -> ServiceError:
        return ServiceError(f"{self.url} does not answer as eldr-serve: HTTP {answer.status_code}")


def parse_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `band=0.1` to {"band": 0.1}; values that are not JSON are text.

    Raises:
        UserInputError: a pair is not of the form name=value.
    """
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise UserInputError(f"{pair!r} is not a parameter: write name=value")
        try:
            parameters[key] = json.loads(value)
        except ValueError:
            parameters[key] = value
    return parameters
