"""The reports of a decode engine to the router: the costs of its steps, and its prefix caches."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, RayError

from eldr_serve.actors import find_actor
from eldr_serve.engine.protocol import Engine
from eldr_serve.scheduling.cost import StepAnswer, StepSums
from eldr_serve.scheduling.worker_names import worker_names

logger = logging.getLogger(__name__)

_REPORT_PERIOD_S = 1.0


class DecodeReporter:
    """Reports an engine's steps and the changes of its prefix caches.

    Args:
        router_name: name of the router's actor.
        count_calls: returns the number of calls to the engine that are open.

    Attributes:
        queued: this replica's share of the requests that wait for a worker.
    """

    def __init__(self, engine: Engine, router_name: str, count_calls: Callable[[], int]) -> None:
        self._engine = engine
        self._router_name = router_name
        self._count_calls = count_calls
        self._numbers = itertools.count(1)
        self.queued = 0.0

    async def run(self) -> None:
        """Report once per period while the engine has calls or has made steps.

        Send a report of steps again, with its number, until the router confirms it.
        """
        router: Any = None  # an actor's handle
        sums = [StepSums()] * self._engine.ranks()  # sums of each rank that are in no report yet
        steps: dict[str, StepSums] = {}  # sums of each worker in a report that is not confirmed
        number = 0  # number of that report
        cache_is_known = False  # the router knows the prefix caches as of the last report
        is_silent = False  # the last report failed, which is logged once
        while True:
            await asyncio.sleep(_REPORT_PERIOD_S)
            sums = [unreported + self._engine.take_steps(rank) for rank, unreported in enumerate(sums)]
            if not (steps or self._count_calls() or any(rank.steps or rank.prompts.any() for rank in sums)):
                self.queued = 0.0  # requests wait only if engines are busy
                continue
            if not steps:
                replica = serve.get_replica_context().replica_id.unique_id
                steps = dict(zip(worker_names(replica, len(sums)), sums, strict=True))
                sums, number = [StepSums()] * len(sums), next(self._numbers)
            changes = self._engine.take_prefix_changes(full=not cache_is_known)
            cache = self._engine.prefix_cache()
            try:
                if router is None:  # the look-up needs a thread, since it blocks while GCS is unavailable
                    router = await asyncio.to_thread(find_actor, self._router_name)
                answer: StepAnswer = await router.observe_steps.remote(steps, cache, changes, number)
            except (ValueError, RayError) as error:  # the router is unavailable
                self.queued, cache_is_known = 0.0, False
                if isinstance(error, ActorDiedError):  # this is final: a restarted actor keeps its handle
                    router = None
                if not is_silent:
                    logger.info("step costs could not be reported: %r", error)
                is_silent = True
                continue
            steps, is_silent = {}, False
            self.queued, cache_is_known = answer.queued, answer.has_all_blocks
