"""Settings of a redeployed YAML and of operators: the later one is live."""

from __future__ import annotations

import logging

import pytest
from tables import unit_table

from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.messages import Restore, Settings
from eldr_serve.router.settings import RouterSettings

FIRST = RouterSettings(model_id="m", policy="shortest-queue")
SECOND = RouterSettings(model_id="m", policy="least-tokens", table=unit_table(2).to_bytes())


async def restored(router: DecodeRouter, settings: Settings) -> Settings:
    """Return the live settings after a client has reported these."""
    router._state.restore(Restore("client", ("r0",), settings=settings))
    return await router.settings()


async def test_a_changed_deployment_replaces_an_earlier_put(caplog: pytest.LogCaptureFixture) -> None:
    router = DecodeRouter(FIRST)
    put = await router.set_policy("random", {})
    await router.configure(SECOND)  # by a new ingress
    assert "least-tokens" in caplog.text
    assert "random" in caplog.text
    live = await restored(router, put)  # from an older ingress
    assert (live.policy, live.table_version) == ("least-tokens", 1)
    again = await router.set_policy("round-robin", {})  # a PUT after the deployment wins
    await router.configure(SECOND)
    assert (await restored(router, live)).policy == again.policy == "round-robin"


async def test_an_unchanged_deployment_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    router = DecodeRouter(FIRST)
    put = await router.set_policy("random", {})
    with caplog.at_level(logging.INFO):
        await router.configure(RouterSettings(**dict(FIRST)))
    assert await router.settings() == put
    assert not caplog.messages


async def test_a_restarted_router_restores_the_live_deployment() -> None:
    """Ray restarts it with the settings of the first deployment."""
    before = DecodeRouter(FIRST)
    await before.configure(SECOND)
    put = await before.set_policy("random", {})
    router = DecodeRouter(FIRST)
    assert await restored(router, put) == put
    await router.configure(SECOND)  # by a new ingress replica, without a redeployment
    assert (await router.settings()).policy == "random"


def test_different_settings_have_different_fingerprints() -> None:
    others = (SECOND, FIRST.model_copy(update={"seed": 1}), FIRST.model_copy(update={"parameters": {"a": 1}}))
    assert FIRST.fingerprint == RouterSettings(**dict(FIRST)).fingerprint
    assert len({settings.fingerprint for settings in (FIRST, *others)}) == 4
