"""Leases of a client whose channel to the router is lost."""

import itertools
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
from ray.exceptions import RayError

from eldr_serve.channel import CallFailedError
from eldr_serve.fleet.directory import ReplicaDirectory
from eldr_serve.router_client import subscription
from eldr_serve.router_protocol.messages import Granted, LiveSettings, Place, Restore, decoder, encode
from tests.support.fake_router import FakeActor, connected_client, loads, router_and_client, wait_until
from tests.support.tables import counts_for, request


async def test_leases_end_with_the_channel_unless_the_client_reconnects() -> None:
    actor = FakeActor(grace_s=0.2)
    connecting = partial(connected_client, actor, "r0", release=False)
    async with connecting() as returning, connecting() as alive:
        async with connecting() as dead:
            for name, client in {"dead": dead, "returning": returning, "alive": alive}.items():
                await client.place(request(name), None)
            assert actor.running.keys() == {"dead", "returning", "alive"}
        returning._subscription._channel.close("cut")
        await wait_until(lambda: actor.running.keys() == {"returning", "alive"})
        assert actor.state.ingresses.ids == {returning.name, alive.name}
        assert actor.ingress_calls.subscriptions.keys() == {returning.name, alive.name}
        assert actor.state.counters["leases_of_lost_ingresses"] == 1
        assert not actor.state.counters["leases_restored"]
        returning.release("returning")
        await wait_until(lambda: actor.running.keys() == {"alive"})
    await wait_until(lambda: not actor.running)
    assert not actor.ingress_calls.subscriptions
    assert not actor.ingress_calls.has_ingresses


async def test_a_clients_old_connection_is_closed_when_it_reconnects() -> None:
    """No client would get or release such a lease."""
    actor = FakeActor()
    old, new = await actor.calls().get_channel(), await actor.calls().get_channel()
    ignore: Any = lambda message: None  # noqa: E731
    for channel in (old, new):
        channel.open_call("subscribe", encode(Restore("c", ("r0",))), ignore, ignore)
        await wait_until(lambda: len(actor.ingress_calls._connected) == 1)
        place = channel.open_call("place", encode(Place(request("a"))), ignore, ignore)
        await wait_until(lambda: actor.running.keys() == {"a"})
    await wait_until(old.closed.done)
    assert len(actor.server.connections) == len(actor.ingress_calls.subscriptions) == 1
    place.close(3)
    await wait_until(lambda: not actor.running)
    new.close("the test ends")


async def test_a_client_that_has_not_subscribed_gets_no_lease() -> None:
    actor, errors = FakeActor(), []
    channel = await actor.calls().get_channel()
    channel.open_call("place", encode(Place(request("a"))), lambda message: None, errors.append)
    await wait_until(lambda: errors)
    assert not actor.running
    channel.close("the test ends")


async def test_an_answer_that_closes_its_channel_affects_no_other_client() -> None:
    """No worker is known, so the router answers each request at once."""
    ingress_calls = FakeActor().ingress_calls
    subscribe, place = ingress_calls.open_methods["subscribe"], ingress_calls.open_methods["place"]
    calls: dict[str, Any] = {}

    def lose(payload: bytes) -> None:  # the peer does not read its data
        for name in "ab":
            calls[name].on_lost()

    lost, alive = Mock(), Mock()
    for client, answer in {"lost": lost, "alive": alive}.items():
        subscribe(encode(Restore(client, ())), answer)
        answer.send.reset_mock()
    lost.send.side_effect = lose
    for name, answer in {"a": lost, "b": lost, "c": alive}.items():
        calls[name] = place(encode(Place(request(name))), answer)
    ingress_calls._run_batch()
    lost.send.assert_called_once()
    alive.send.assert_called_once()
    assert ingress_calls.place_calls.keys() == {"c"}


async def test_a_lease_that_cannot_be_adopted_adds_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_and_client("r0") as (actor, client):
        await client.place(request("a"), None)
        actor.restart()
        placer = actor.state.placer
        monkeypatch.setattr(placer.workers, "record_placement", Mock(side_effect=ZeroDivisionError))
        await wait_until(lambda: placer.workers.record_placement.called and not client._place_calls)
        assert not placer.running
        assert not actor.ingress_calls.place_calls
        assert not any(calls for calls, _ in loads(actor.state).values())
        assert client.leases.keys() == {"a"}  # the ingress still holds it


async def test_a_release_while_the_channel_is_lost_is_sent_over_the_next() -> None:
    async with router_and_client("r0", "r1") as (actor, client):
        for name in "abc":
            await client.place(request(name), counts_for(0))
        client.set_generated_tokens("b", 5)
        actor.disconnect()
        client.release("a")
        await wait_until(lambda: actor.running.keys() == {"b", "c"})
        assert actor.running["b"].generated_tokens == 5
        assert not client.router_unreachable


async def test_the_router_knows_the_tokens_that_a_resumed_answer_has_already() -> None:
    async with router_and_client("r0") as (actor, client):
        lease = await client.place(request("a"), None, generated_tokens=7)
        assert actor.running["a"].generated_tokens == lease.generated_tokens == 7
        assert loads(actor.state) == {"r0": (1, 10 + 7)}


async def test_a_change_of_replicas_is_sent_before_the_next_request_and_without_one() -> None:
    actor, directory = FakeActor(), ReplicaDirectory()
    async with connected_client(actor, "r0", directory=directory) as client:
        await client.place(request("a"), None)
        directory.publish({"r1": {}})
        assert (await client.place(request("b"), None)).worker == "r1"
        directory.publish({"r2": {}})
        await wait_until(lambda: actor.state.positions.workers == ["r2"])


async def test_workers_that_are_lost_while_the_channel_is_lost_keep_no_positions() -> None:
    actor, directory = FakeActor(), ReplicaDirectory()
    async with connected_client(actor, "r0", directory=directory) as client:
        await wait_until(lambda: actor.state.positions.workers == ["r0"])
        actor.alive = False
        await wait_until(lambda: not client._subscription.connected)
        directory.publish({})
        actor.alive = True
        await wait_until(lambda: client._subscription.connected)
        assert not actor.state.positions.num_live
        directory.publish({"r1": {}})
        await wait_until(lambda: actor.state.positions.workers == ["r1"])


async def test_a_client_that_has_not_known_a_worker_yet_reports_none() -> None:
    actor = FakeActor()
    async with connected_client(actor) as client:
        await wait_until(lambda: client._subscription.connected)
        client._subscription.report_workers()
        (restore,) = actor.restored
        assert "workers" not in restore  # a router of an earlier version would not know null
        assert not actor.state.positions._reachable


@pytest.mark.parametrize("error", [RayError("dead"), TimeoutError(), CallFailedError(500, b"{}")])
async def test_tenants_get_one_error_if_the_router_does_not_answer(error: Exception) -> None:
    async with connected_client(FakeActor()) as client:
        with patch.object(client._subscription, "call", side_effect=error), pytest.raises(ConnectionError):
            await client.share_limits("a", {})


def test_retries_are_fast_while_a_router_restarts_and_slower_later() -> None:
    delays = list(itertools.islice(subscription._retry_delays(), subscription._FAST_RETRIES + 6))
    assert delays[: subscription._FAST_RETRIES] == [0.1] * subscription._FAST_RETRIES
    assert delays[subscription._FAST_RETRIES :] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


async def test_retries_are_fast_again_after_a_success() -> None:
    async with router_and_client("r0") as (actor, client):
        await client.place(request("a"), None)
        delays = client._subscription._delays = itertools.repeat(0.01)
        actor.restart()
        await wait_until(lambda: client._subscription._delays is not delays)
        assert next(client._subscription._delays) == 0.1


async def test_unreadable_settings_are_logged_once_with_their_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router_and_client("r0") as (actor, client):
        await client.place(request("a"), None)
        channel, tries = client._subscription._channel, Mock(side_effect=ValueError("a newer version"))
        assert channel is not None
        with monkeypatch.context() as patches:
            patches.setattr(client, "on_settings", tries)
            actor.state.live_settings.set_policy("random", {})
            await wait_until(lambda: tries.call_count == 3)
            assert client.router_unreachable
        await wait_until(lambda: not client.router_unreachable)
        reason = "the settings of DecodeRouter cannot be used: ValueError('a newer version')"
        assert caplog.messages.count(f"{reason}; local fallback places the requests") == 1
        assert "does not answer" not in caplog.text
        assert channel.closed.result() == reason


async def test_an_ingress_restores_the_positions_of_workers_in_a_restarted_router() -> None:
    actor, directory = FakeActor(), ReplicaDirectory()
    async with connected_client(actor, "r1", directory=directory) as client:
        subscription = client._subscription
        await wait_until(lambda: subscription._positions == ("r1",))
        directory.publish({"r0": {}, "r1": {}})  # scaled up
        await wait_until(lambda: subscription._positions == ("r1", "r0"))
        actor.restart()
        await wait_until(lambda: actor.state.positions.workers)
        assert actor.state.positions.workers == ["r1", "r0"]
        directory.publish({"r0": {}, "new": {}})
        await wait_until(lambda: subscription._positions == ("new", "r0"))


async def test_an_older_ingress_gets_only_settings() -> None:
    actor, answers, errors = FakeActor(), [], []
    channel = await actor.calls().get_channel()
    channel.open_call("subscribe", encode(Restore("c", ("r0",))), answers.append, errors.append)
    await wait_until(lambda: answers)
    actor.state.ingresses.set_reachable_workers("c", ["r0", "r1"])
    actor.state.live_settings.set_policy("random", {})
    await wait_until(lambda: len(answers) == 2)
    assert [decoder(LiveSettings)(answer).policy for answer in answers] == ["locality-band", "random"]
    assert not errors
    channel.close("the test ends")


async def test_a_lease_that_cannot_be_adopted_does_not_close_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor, errors = FakeActor(), []
    channel = await actor.calls().get_channel()
    for method, message in {
        "subscribe": Restore("c", ("r0",)),
        "place": Place(request("other")),
    }.items():
        channel.open_call(method, encode(message), lambda message: None, errors.append)
    call = channel.open_call("place", encode(Place(request("a"))), lambda message: None, errors.append)
    await wait_until(lambda: actor.running.keys() == {"a", "other"})
    with patch.object(actor.state.leases, "adopt_lease", side_effect=RuntimeError("broken")):
        call.note(encode(Place(request("a"), Granted("r0"))))
        await wait_until(lambda: actor.running.keys() == {"other"})
    assert caplog.messages == ["the router cannot place request a again"]
    call.note(tokens=3)
    call.close(3)
    await wait_until(lambda: actor.ingress_calls.place_calls.keys() == {"other"})
    assert not channel.closed.done()
    assert not errors
    channel.close("the test ends")
