"""The resources that an idle service still holds."""

from __future__ import annotations

import time
from typing import Any

import httpx

from eldr_serve.commands.client import OperatorClient

SETTLE_S = 40.0  # KV blocks of a disconnected request are held for a lease of up to 30 s


def held_resources(url: str, admin_key: str | None) -> list[str]:
    """Return what the service still holds, one entry each; empty if idle.

    Without the admin key only the ingress's own state is known.
    """
    return held_in_status(OperatorClient(url, admin_key).status())


def held_in_status(status: dict[str, Any]) -> list[str]:
    """Return what the service still holds according to its status, one entry each."""
    if "workers" not in status:
        amounts = {key: status["ingress"][key] for key in ("in_flight", "leases")}
        return [f"{what}: {amount}" for what, amount in amounts.items() if amount]
    amounts = {
        "requests in flight": status["ingress"]["in_flight"],
        "leases": status["leases"] + status["ingress"]["leases"],
        "requests in the decode queue": status["decode_queue"]["size"],
        "requests on decode workers": sum(worker["in_flight"] for worker in status["workers"]),
        "KV tokens on decode workers": sum(worker["kv_tokens"] for worker in status["workers"]),
        "KV usage of prefill": sum(status["ingress"]["prefill_kv_usage"].values()),
        "KV usage of decode": sum(status["ingress"]["decode_kv_usage"].values()),
    }
    return [f"{what}: {amount}" for what, amount in amounts.items() if amount]


def settle(url: str, model: str, admin_key: str | None, timeout_s: float = SETTLE_S) -> list[str]:
    """Return what is wrong with the service after all answers have ended, or an empty list."""
    deadline = time.monotonic() + timeout_s
    while (resources := held_resources(url, admin_key)) and time.monotonic() < deadline:
        time.sleep(0.5)
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    problems = [f"left behind: {what}" for what in resources]
    return problems if answer.status_code == 200 else [*problems, f"a valid request got {answer.status_code}"]
