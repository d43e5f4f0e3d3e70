"""An ingress's channels to the replicas of a deployment."""

import asyncio
import itertools
from typing import Any
from unittest.mock import Mock

import pytest

from eldr_serve.channel import ChannelLostError
from eldr_serve.channel.address import Address
from eldr_serve.engine.methods import SLOT_METHODS
from eldr_serve.engine.report_fields import ADDRESS
from eldr_serve.fleet import fleet as fleet_module
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.fleet.fleet import Fleet
from tests.support.fake_router import wait_until


async def test_a_replica_that_refuses_connections_is_logged_once_and_tried_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries_s: list[float] = []
    loop = asyncio.get_running_loop()
    channel = Mock(is_open=True, closed=loop.create_future(), in_flight=5)

    async def connect(address: Address, changed: Any) -> Any:
        tries_s.append(loop.time())
        if len(tries_s) < 5:
            raise ChannelLostError("refused")
        return channel

    monkeypatch.setattr(Address, "connect", connect)
    monkeypatch.setattr(fleet_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(fleet_module, "_MAX_RETRY_S", 0.04)
    directory = ReplicaDirectory()
    directory.publish({"r0": {ADDRESS: {"host": "h", "port": 1, "secret": "s"}}})
    fleet = Fleet(directory)
    fleet.start()
    await wait_until(lambda: fleet.live_workers == ("r0",))
    waits_s = [after - before for before, after in itertools.pairwise(tries_s)]
    assert all(map(float.__ge__, waits_s, (0.0099, 0.0199, 0.0399, 0.0399)))
    assert [message.split(":")[0] for message in caplog.messages] == [
        "cannot connect to replica r0 yet",
        "connected to replica r0",
    ]
    assert fleet.open_calls == {"r0": 5}
    channel.count_calls = {SLOT_METHODS: 3}.get
    assert [fleet.slot_calls_of(name) for name in ("r0", "unknown")] == [3, 0]
    await fleet.stop()


@pytest.mark.parametrize("is_connecting", [True, False])
async def test_a_replica_that_leaves_and_returns_has_one_channel(
    monkeypatch: pytest.MonkeyPatch, is_connecting: bool
) -> None:
    channels: list[Any] = []
    accepts = asyncio.Event()

    async def connect(address: Address, changed: Any) -> Any:
        channels.append(Mock(is_open=True, closed=asyncio.get_running_loop().create_future()))
        await accepts.wait()
        return channels[-1]

    monkeypatch.setattr(Address, "connect", connect)
    if not is_connecting:
        accepts.set()
    directory = ReplicaDirectory()
    known = {"r0": {ADDRESS: {"host": "h", "port": 1, "secret": "s"}}}
    fleet = Fleet(directory)
    fleet.start()
    for replicas in (known, {}, known):
        directory.publish(replicas)
        await asyncio.sleep(0.01)
        assert fleet.live_workers == (() if is_connecting else tuple(replicas))
    accepts.set()
    await wait_until(lambda: fleet.live_workers == ("r0",))
    assert len(channels) == 1
    channels[0].closed.set_result("it is lost")
    await wait_until(lambda: len(channels) == 2 and fleet.live_workers)
    directory.publish({})
    channels[1].closed.set_result("the replica has ended")
    await wait_until(lambda: not fleet.is_connected("r0"))
    directory.publish(known)
    await wait_until(lambda: len(channels) == 3 and fleet.live_workers)
    await fleet.stop()
