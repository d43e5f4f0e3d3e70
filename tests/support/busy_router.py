"""A router that has worked for some minutes, for tests of the live page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.options import IngressOptions
from eldr_serve.router_protocol.messages import IngressReport, NamedPolicy, Restore, StreamLatencies
from eldr_serve.scheduling import StepCost
from eldr_serve.scheduling.cost import StepSums
from tests.support.fake_router import FakeActor, place, release
from tests.support.ingress_app import App, running_app, stream_answer
from tests.support.tables import request

L, E = 4, 16
DOMAINS = ("code", "prose", "<b>law</b>")


def busy_actor(seed: int = 0, policy: str = "marginal-cost") -> FakeActor:
    """Return a router after 9 minutes: two workers, requests of three domains, engine reports, a shadow."""
    rng = np.random.default_rng(seed)
    now = [0.0]
    actor = FakeActor(policy=policy, table=None, clock=lambda: now[0])
    state = actor.state
    state.expect_counts(L, E)
    state.restore_from_ingress(Restore("c", ("r0", "r1")))
    state.live_settings.set_shadow(NamedPolicy("shortest-queue"))
    favourites = [rng.permutation(E)[:5] for _ in DOMAINS]
    for number in range(90):
        now[0] += 6
        kind = int(rng.integers(3))
        counts = rng.integers(0, 3, (L, E)).astype(np.uint32)
        counts[:, favourites[kind]] += 20
        place(state, request(f"request{number}", 40, 60, expert_counts=counts, domain=DOMAINS[kind]))
        running = list(state.placer.running)
        state.leases.set_generated_tokens({name: int(rng.integers(1, 60)) for name in running})
        release(state, *running[:-12])
        stream = StreamLatencies(float(rng.gamma(3, 0.1)), float(rng.gamma(9, 0.003)))
        state.ingresses.add_report("c", IngressReport(streams=(stream,)))
        batch = rng.integers(3, 9, 6)
        experts = rng.integers(20, 40, 6)
        for replica in ("r0", "r1"):
            times = StepCost(2e-3, 1e-4, 0.0, 9e-5).seconds(batch, 0, experts)
            state.observe_steps(StepSums.from_steps(batch, 100 * batch, experts, times), replica)
        state.comparison.catch_up()
    return actor


@asynccontextmanager
async def running_live_page(actor: FakeActor, **options: Any) -> AsyncIterator[tuple[App, str]]:
    """Run the application, and yield it and the address of its live page."""
    async with running_app(actor=actor, **{"decode": stream_answer} | options) as app:
        server = HttpServer(app.http, IngressOptions(port=0))
        try:
            yield app, f"http://127.0.0.1:{server.port}/eldr/"
        finally:
            server._server.force_exit = True
            await server.drain()
