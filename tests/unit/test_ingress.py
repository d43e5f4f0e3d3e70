"""What the ingress refuses, and how it says so."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from eldr_serve.serving.errors import Overloaded, SwapRefused
from eldr_serve.serving.ingress import EldrIngress, IngressOptions


class Client:
    """A RouterClient that refuses every change."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def start(self) -> None:
        pass

    def count(self, event: str) -> None:
        self.called.append(event)

    async def call(self, method: str, *args: Any) -> Any:
        self.called.append(method)
        raise SwapRefused("it does not fit")


def ingress(key: str | None = "key", in_flight: int = 0) -> Any:
    """An ingress without Ray around it."""
    made = object.__new__(EldrIngress)
    made._admin_key_sha256 = hashlib.sha256(key.encode()).hexdigest() if key else None
    made._client = Client()
    made._options = IngressOptions(max_in_flight=4)
    made._in_flight = in_flight
    return made


def request(key: str | None = None) -> Any:
    return SimpleNamespace(headers={"authorization": f"Bearer {key}"} if key else {}, state=SimpleNamespace())


@pytest.mark.parametrize(
    ("configured", "given", "status"),
    [(None, None, 403), (None, "key", 403), ("key", None, 401), ("key", "wrong", 401), ("key", "key", 400)],
)
async def test_changes_need_the_key(configured: str | None, given: str | None, status: int) -> None:
    made = ingress(configured)
    answer = await made._administer(request(given), "swap_table", b"")
    assert answer.status_code == status
    error = json.loads(answer.body)["error"]
    assert error["code"] == status
    assert "\n" not in error["message"]
    assert made._client.called == (["swap_table"] if status == 400 else [])


async def test_too_many_requests_are_refused_before_prefill() -> None:
    made = ingress(in_flight=4)

    async def endpoint(*_: Any) -> Any:
        raise AssertionError("the request was let in")

    answer = await made._admitted(endpoint, None, request())
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert made._client.called == ["refused_overload"]


async def test_no_capacity_is_a_503_that_says_when_to_come_again() -> None:
    async def endpoint(*_: Any) -> Any:
        raise Overloaded("3 decode replicas failed this request", retry_after_s=7)

    answer = await ingress()._admitted(endpoint, None, request())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"
    assert json.loads(answer.body)["error"]["type"] == "overloaded"
