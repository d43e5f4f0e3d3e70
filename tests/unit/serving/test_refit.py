"""A router that has its table fitted anew by itself: when, and what it does with the new one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tables import unit_table

from eldr_serve.artifacts import RoutingTable
from eldr_serve.errors import SwapRefused
from eldr_serve.fitting.refit import refitted
from eldr_serve.routing.loading import load
from eldr_serve.serving import refit
from eldr_serve.serving.decode_router import DecodeRouter
from eldr_serve.serving.refit import LiveRefit
from eldr_serve.serving.router_settings import RefitOptions, RouterSettings
from eldr_serve.serving.router_state import RouterState

OPTIONS = RefitOptions(every_s=60.0, min_gain=0.02)


def traffic(*experts: int, each: int = 20) -> list[np.ndarray[Any, Any]]:
    """Prompts of kinds: each has its expert of layer 0, and some noise."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(0.3, (each * len(experts), 2, 8)).astype(np.uint32)
    counts[np.arange(len(counts)), 0, np.tile(experts, each)] += 20
    return list(counts)


def state_of(workers: int, *experts: int) -> RouterState:
    """Over a table of two centroids, for experts 0 and 1."""
    state = RouterState(model_id="m", policy="locality-band", table=unit_table(2).to_bytes())
    state.update_workers(tuple(f"r{number}" for number in range(workers)))
    state.recent.extend(traffic(*experts))
    return state


async def _fit(*arguments: Any) -> tuple[bytes, str] | None:
    """The job itself, in this process."""
    return refitted(*arguments)


def served(state: RouterState) -> list[int]:
    """Each worker's expert."""
    assert state.settings.table is not None
    centroids = RoutingTable.from_bytes(state.settings.table).centroids
    return [int(expert) for expert in centroids[:, :8].argmax(axis=1)]


@pytest.mark.parametrize(
    ("workers", "experts", "swaps"),
    [
        (2, (0, 1), 0),  # the table fits
        (2, (5, 6), 1),  # traffic has drifted
        (3, (0, 1, 5), 1),  # there is one replica more
    ],
)
async def test_a_table_is_swapped_when_it_does_not_fit_any_more(
    workers: int, experts: tuple[int, ...], swaps: int
) -> None:
    state = state_of(workers, *experts)
    live = LiveRefit(OPTIONS, lambda: state, _fit)
    await live.look()
    assert not state.counters["refits"]  # replicas may still be coming
    await live.look()
    assert state.counters["refits"] == state.counters["table_swaps"] == swaps
    assert set(served(state)) == set(experts)
    await live.look()
    assert state.counters["refits"] == swaps  # now it fits


async def test_a_table_that_somebody_swaps_in_meanwhile_stays() -> None:
    state = state_of(2, 5, 6)

    async def slow(*arguments: Any) -> tuple[bytes, str] | None:
        found = refitted(*arguments)
        state.swap_table(unit_table(2).to_bytes())
        return found

    live = LiveRefit(OPTIONS, lambda: state, slow)
    await live.look()
    await live.look()
    assert not state.counters["refits"]
    assert served(state) == [0, 1]


async def test_without_a_table_or_replicas_nothing_is_fitted() -> None:
    async def never(*arguments: Any) -> tuple[bytes, str] | None:
        raise AssertionError

    for state in (RouterState(model_id="m", policy="round-robin"), state_of(0, 5, 6)):
        await LiveRefit(OPTIONS, lambda state=state: state, never).look()


async def test_a_refused_or_failed_refit_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The next look tries again."""
    state, looks = state_of(2, 5, 6), 0
    swapped = asyncio.Event()

    async def fails_first(*arguments: Any) -> tuple[bytes, str] | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("too few signatures")
        if looks == 2:
            raise SwapRefused("of another model")
        found = refitted(*arguments)
        if found is not None:
            swapped.set()
        return found

    running = asyncio.create_task(
        LiveRefit(OPTIONS.model_copy(update={"every_s": 0.001}), lambda: state, fails_first).run()
    )
    async with asyncio.timeout(30):
        await swapped.wait()
        while not state.counters["refits"]:
            await asyncio.sleep(0)
    running.cancel()
    assert "too few signatures" in caplog.text
    assert "of another model" in caplog.text


async def test_a_deployment_switches_it_on_and_off() -> None:
    on = RouterSettings(model_id="m", policy="round-robin", refit=RefitOptions())
    router = DecodeRouter(on.model_copy(update={"refit": None}))
    assert router._refitting is None
    await router.configure(on)
    assert router._refitting is not None
    running = router._refitting
    await router.configure(on.model_copy(update={"refit": None}))
    assert router._refitting is None
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


def test_the_job_is_where_the_router_looks_for_it() -> None:
    assert load(refit._JOB, "the job") is refitted
