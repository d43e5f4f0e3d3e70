"""An operator drains a decode replica: it gets no further requests, and an error names what is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.channel.address import Address
from eldr_serve.cli import app as command
from eldr_serve.commands import client as operator
from eldr_serve.commands.client import OperatorClient
from eldr_serve.engine.methods import DRAIN
from eldr_serve.engine.report_fields import ADDRESS
from eldr_serve.fleet.drain import LastReplicaError, UnknownReplicaError, drain
from eldr_serve.replicas import servers
from tests.support.engine_server import generate, serving
from tests.support.fake_fleet import FakeFleet, Sent
from tests.support.fake_router import wait_until
from tests.support.ingress_app import KEY, running_app


def fleet(*names: str) -> Any:
    async def answer(sent: Sent) -> AsyncIterator[Any]:
        assert sent.method == DRAIN
        yield msgspec.msgpack.encode(3), 0

    return FakeFleet(answer, *names)


def body(replica: str) -> bytes:
    return json.dumps({"replica": replica}).encode()


async def test_a_drained_replica_counts_its_calls_and_refuses_others_on_every_channel() -> None:
    async with serving(servers.DecodeServer, router_name="router") as (server, channel):
        call = generate(channel, tokens=5000)
        assert await call.read() is not None
        for _ in range(2):  # the request may be repeated
            chunk = await channel.call(DRAIN, {}).read()
            assert chunk is not None
            assert msgspec.msgpack.decode(chunk.payload) == 1
        await wait_until(lambda: not channel.is_open)
        assert call.is_leaving
        later = await Address(**(await server.record_replica_metadata())[ADDRESS]).connect()
        await wait_until(lambda: not later.is_open)
        later.close("the test ends")
        await server.check_health()  # Serve keeps it
        call.cancel()
        await call.wait_until_ended()
        again = await channel.call(DRAIN, {}).read()
        assert again is not None
        assert msgspec.msgpack.decode(again.payload) == 0


async def test_the_ingress_asks_the_named_replica() -> None:
    decode = fleet("r0", "r1")
    assert await drain(decode, "r1") == 3
    assert [sent.replica for sent in decode.sent] == ["r1"]


@pytest.mark.parametrize(
    ("names", "replica", "error", "sentence"),
    [
        (("r0",), "r0", LastReplicaError, "the only decode replica that takes calls"),
        (("r0", "r1"), "r7", UnknownReplicaError, "no decode replica 'r7'"),
    ],
)
async def test_an_invalid_drain_reaches_no_replica(
    names: tuple[str, ...], replica: str, error: type[Exception], sentence: str
) -> None:
    decode = fleet(*names)
    with pytest.raises(error, match=sentence):
        await drain(decode, replica)
    assert not decode.sent


async def test_a_drain_needs_the_admin_key() -> None:
    async with running_app() as app:
        assert (await app.put("/eldr/drain", None, content=body("r0"))).status_code == 401
        assert not app.decode.sent


async def drain_three_calls(sent: Sent) -> AsyncIterator[Any]:
    yield msgspec.msgpack.encode(3), 0


@pytest.mark.parametrize("named", ["r1", "r1/0"])
async def test_a_drain_is_answered_with_the_replica_and_its_calls(named: str) -> None:
    async with running_app(decode=drain_three_calls, validated=False) as app:
        assert (await app.put("/eldr/drain", KEY, content=body(named))).json() == {
            "replica": "r1",
            "in_flight": 3,
        }


async def fail_call(sent: Sent) -> AsyncIterator[Any]:
    raise CallFailedError(400, b"no")
    yield b""


async def lose_channel(sent: Sent) -> AsyncIterator[Any]:
    raise ChannelLostError("cut")
    yield b""


@pytest.mark.parametrize(
    ("answer", "lost", "content", "status", "sentence"),
    [
        (drain_three_calls, {"r1"}, body("r0"), 409, "r0 is the only decode replica that takes calls"),
        (drain_three_calls, set(), body("r7"), 400, "there is no decode replica 'r7'"),
        (drain_three_calls, set(), b"{}", 400, "replica: Field required"),
        (drain_three_calls, set(), b"[", 400, "Invalid JSON"),
        (fail_call, set(), body("r0"), 400, "decode replica r0: no"),
        (lose_channel, set(), body("r0"), 503, "decode replica r0 was lost: cut"),
    ],
)
async def test_the_status_of_a_refused_drain_names_its_cause(
    answer: Any, lost: set[str], content: bytes, status: int, sentence: str
) -> None:
    async with running_app(decode=answer, validated=False) as app:
        app.decode.lost = lost
        refusal = await app.put("/eldr/drain", KEY, content=content)
        assert refusal.status_code == status
        assert sentence in refusal.json()["error"]["message"]


def test_the_command_waits_until_the_replica_has_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = [2, 1, 0, 9]
    calls: list[Any] = []

    def ask(self: OperatorClient, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        calls.append((method, path, kwargs["json"]))
        return {"replica": "r0", "in_flight": remaining.pop(0)}

    monkeypatch.setattr(OperatorClient, "_request_json", ask)
    monkeypatch.setattr(operator, "_DRAIN_POLL_S", 0.0)
    done = CliRunner().invoke(command, ["drain", "r0"], prog_name="eldr")
    assert json.loads(done.output) == {"replica": "r0", "in_flight": 0}
    assert calls == [("PUT", "/eldr/drain", {"replica": "r0"})] * 3
    done = CliRunner().invoke(command, ["drain", "r0", "--wait", "0"], prog_name="eldr")
    assert json.loads(done.output)["in_flight"] == 9
