"""Leases of an ingress follow its channel to the router, over a real channel."""

from __future__ import annotations

from typing import Any

import pytest
from router_talk import leased, settled
from tables import request

from eldr_serve.channel import Channel, ChannelServer
from eldr_serve.channel.actor_calls import RouterCalls
from eldr_serve.channel.address import Address
from eldr_serve.router import actor as decode_router
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.messages import Exchange, Restore
from eldr_serve.router.settings import RouterSettings


async def _open(handler: Any, **options: Any) -> tuple[Address, ChannelServer]:
    server = ChannelServer("secret", handler, limit=9, full=RuntimeError, **options)
    return Address("127.0.0.1", await server.start("127.0.0.1"), "secret"), server


class _Calls(RouterCalls):
    def __init__(self, address: Address) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        self._address = address

    async def _connect(self) -> Channel:
        return await self._address.connect()


def _restore(client: str) -> Restore:
    return Restore(client, ("r0",), None, (leased(client, "r0"),))


async def test_leases_of_an_ingress_go_with_its_channel_unless_it_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_router, "open_channel", _open)
    monkeypatch.setattr(decode_router, "_GRACE_S", 0.2)
    router = DecodeRouter(RouterSettings(model_id="m"))
    address = await router.address()
    dead, again, alive = (_Calls(address) for _ in range(3))
    for name, calls in {"dead": dead, "again": again, "alive": alive}.items():
        await calls.call("restore", _restore(name))
    assert set(router._state.placer.running) == {"dead", "again", "alive"}
    dead.close()
    again.close()
    await again.call("restore", _restore("again"))
    await settled(lambda: set(router._state.placer.running) == {"again", "alive"})
    await settled(lambda: not [name for name in router._peers if name == "dead"])
    assert router._state.counters["leases_of_lost_clients"] == 1
    again.close()
    alive.close()
    await settled(lambda: not router._state.placer.running)
    assert not router._peers
    for task in router._tasks:
        task.cancel()


async def test_what_comes_late_by_a_connection_that_its_client_has_left_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would hear of the lease, nor release it."""
    monkeypatch.setattr(decode_router, "open_channel", _open)
    router = DecodeRouter(RouterSettings(model_id="m"))
    address = await router.address()
    left, now = _Calls(address), _Calls(address)
    await left.call("restore", _restore("c"))
    epoch = (await now.call("restore", Restore("c", ("r0",), None, ()))).epoch
    message = Exchange("c", (request("late"),), known_epoch=epoch)
    assert (await left.call("exchange", message)).refused == "unknown-client"
    assert not router._state.placer.running
    assert (await now.call("exchange", message)).refused is None
    assert set(router._state.placer.running) == {"late"}
    left.close()
    now.close()
    for task in router._tasks:
        task.cancel()
