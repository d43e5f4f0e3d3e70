"""Settings of a redeployed YAML and of operators: the later one is live."""

import logging
from functools import partial
from unittest.mock import Mock

import pytest

from eldr_serve.errors import SwapRefusedError
from eldr_serve.monitoring import supervision
from eldr_serve.router import actor
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import LiveSettings, Restore
from eldr_serve.scheduling import StepCost
from tests.support.fake_router import wait_until
from tests.support.tables import unit_table

FIRST = RouterSettings(model_id="m", policy="shortest-queue")
SECOND = RouterSettings(model_id="m", policy="least-tokens", table=unit_table(2).to_bytes())


async def restore(router: DecodeRouter, settings: LiveSettings) -> LiveSettings:
    """Return the live settings after an ingress has reported these."""
    router._state.restore_from_ingress(Restore("ingress", ("r0",), settings=settings))
    return await router.settings()


async def test_a_changed_deployment_replaces_an_earlier_put(caplog: pytest.LogCaptureFixture) -> None:
    router = DecodeRouter(FIRST)
    put = await router.set_policy("random", {})
    await router.configure(SECOND)  # a new ingress does so
    assert "least-tokens" in caplog.text
    assert "random" in caplog.text
    live = await restore(router, put)  # an older ingress does so
    assert (live.policy, live.table_version) == ("least-tokens", 1)
    again = await router.set_policy("round-robin", {})  # a PUT after the deployment wins
    await router.configure(SECOND)
    assert (await restore(router, live)).policy == again.policy == "round-robin"


async def test_metrics_are_exported_again_after_an_export_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    export = Mock(side_effect=[RuntimeError, *[None] * 1000])
    monkeypatch.setattr(supervision, "supervise", partial(supervision.supervise, delay_s=0.0))
    monkeypatch.setattr(actor, "PERIOD_S", 0.001)
    router = DecodeRouter(FIRST)
    monkeypatch.setattr(router._metrics, "export", export)
    await wait_until(lambda: export.call_count > 2)


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
    assert await restore(router, put) == put
    await router.configure(SECOND)  # a new ingress replica does so without a redeployment
    assert (await router.settings()).policy == "random"


async def test_a_deployment_changes_the_time_to_connect_again() -> None:
    router = DecodeRouter(FIRST)
    await router.configure(SECOND.model_copy(update={"ingress_timeout_s": 9.0}))
    assert router._ingress_calls._grace_s == 9.0


async def test_a_deployment_changes_the_patience_of_the_queue_and_keeps_an_operators_policy() -> None:
    router = DecodeRouter(FIRST.model_copy(update={"queue_timeout_s": 8.0}))
    assert router._state.placer.queue.patience_s == 4.0
    put = await router.set_policy("random", {})
    await router.configure(FIRST.model_copy(update={"queue_timeout_s": 20.0}))
    assert router._state.placer.queue.patience_s == 10.0
    assert await router.settings() == put


async def test_an_invalid_deployment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    router, apply_settings = DecodeRouter(FIRST), Mock()
    monkeypatch.setattr(router._pool, "apply_settings", apply_settings)
    before = await router.settings()
    with pytest.raises(SwapRefusedError):
        await router.configure(SECOND.model_copy(update={"model_id": "another"}))  # the table is for "m"
    assert await router.settings() == before
    assert not apply_settings.called
    await router.configure(SECOND)
    apply_settings.assert_called_once_with(SECOND.pool)


def test_different_settings_have_different_fingerprints() -> None:
    others = (SECOND, FIRST.model_copy(update={"seed": 1}), FIRST.model_copy(update={"parameters": {"a": 1}}))
    priced = FIRST.model_copy(update={"cost": StepCost(batch_s={1: 0.0, 8: 1e-4})})
    assert priced.fingerprint != FIRST.model_copy(update={"cost": StepCost()}).fingerprint
    assert FIRST.fingerprint == RouterSettings(**dict(FIRST)).fingerprint
    assert len({settings.fingerprint for settings in (FIRST, *others)}) == 4


def test_the_order_of_parameters_does_not_change_the_fingerprint() -> None:
    orders = ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    first, second = (FIRST.model_copy(update={"parameters": parameters}) for parameters in orders)
    assert first.fingerprint == second.fingerprint
