"""Settings of a redeployed YAML and of operators: the later one is live."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from eldr_serve.errors import SwapRefusedError
from eldr_serve.monitoring import supervision
from eldr_serve.router import actor, pool_link
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import LiveSettings, Restore
from eldr_serve.scheduling import StepCost
from eldr_serve.signatures.settings import PoolSettings, SignatureOptions
from tests.support.fake_router import wait_until
from tests.support.tables import unit_table

FIRST = RouterSettings(model_id="m", policy="shortest-queue")
SECOND = RouterSettings(model_id="m", policy="least-tokens", table=unit_table(2).to_bytes())
THIRD = FIRST.model_copy(update={"policy": "round-robin"})
COST = StepCost(batch_s={1: 0.0, 8: 1e-4})
POOL = PoolSettings("eldr", "router", "m", SignatureOptions(actors=1))


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


async def put_after(settings: RouterSettings) -> LiveSettings:
    """Return the live settings of an operator who sets the policy `random` in this deployment."""
    router = DecodeRouter(FIRST)
    await router.configure(settings)
    put = await router.set_policy("random", {})
    return replace(put, version=put.version - 1000)  # a restart takes longer than this test


def seed_of(router: DecodeRouter) -> int:
    """Return the seed, below 9, of the placer's random numbers."""
    states = {n: np.random.default_rng(n).bit_generator.state for n in range(9)}
    return next(n for n, state in states.items() if state == router._state.placer._rng.bit_generator.state)


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("model_id", "another", lambda router: router._state.model_id),
        ("adapters", ("a",), lambda router: router._state.placer.workers._adapters._first),
        ("cost", COST, lambda router: router._state.costs.cost),
        ("seed", 7, seed_of),
        ("ingress_timeout_s", 9.0, lambda router: router._ingress_calls._grace_s),
        ("expert_placements", (b"{}",), lambda router: router._expert_placements),
        ("pool", POOL, lambda router: router._pool._settings),
        ("queue_timeout_s", 30.0, lambda router: 2 * router._state.placer.queue.patience_s),
    ],
)
async def test_a_restarted_router_gets_each_deployed_setting_back(
    field: str, value: Any, read: Callable[[DecodeRouter], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("start_pool", "end_pool"):
        monkeypatch.setattr(pool_link, name, Mock())
    deployed = FIRST.model_copy(update={field: value})
    put = await put_after(deployed)
    router = DecodeRouter(FIRST)  # Ray restarts it with the settings of the first deployment
    assert read(router) != value
    await router.configure(deployed, put)  # an ingress that connects again does so
    assert read(router) == value
    assert (await restore(router, put)).policy == "random"


async def test_a_restarted_router_keeps_the_table_of_a_later_model() -> None:
    deployed = RouterSettings(model_id="n", policy="least-tokens", table=unit_table(2, model="n").to_bytes())
    put = await put_after(deployed)
    router = DecodeRouter(FIRST)
    await router.configure(deployed, put)
    assert (await restore(router, put)).table == deployed.table


async def test_an_ingress_of_an_earlier_deployment_does_not_revert_a_restarted_router() -> None:
    put = await put_after(SECOND)
    router = DecodeRouter(FIRST)
    await router.configure(FIRST, put)
    assert await restore(router, put) == put
    await router.configure(SECOND, put)
    await router.configure(FIRST, put)
    assert router._state_fingerprint == SECOND.fingerprint
    assert await restore(router, put) == put


@pytest.mark.parametrize("third", [THIRD, FIRST])
async def test_a_deployment_during_a_restart_replaces_the_earlier_one(third: RouterSettings) -> None:
    put = await put_after(SECOND)
    router = DecodeRouter(FIRST)
    await router.configure(third)  # a new ingress is the first to reach the restarted router
    await router.configure(SECOND, put)
    assert (await restore(router, put)).policy == third.policy
    assert router._state_fingerprint == third.fingerprint


async def test_a_put_survives_a_restart_that_a_new_ingress_sees_first() -> None:
    put = await put_after(SECOND)
    router = DecodeRouter(FIRST)
    await router.configure(SECOND)
    await router.configure(SECOND, put)
    assert (await restore(router, put)).policy == "random"
    later = await router.set_policy("round-robin", {})
    assert await restore(router, put) == later


async def test_a_router_without_a_pool_refuses_its_reports() -> None:
    with pytest.raises(RuntimeError, match="no settings of a signature pool"):
        await DecodeRouter(FIRST).report_pool({})


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
