"""Warm-up requests for each prefill-decode pair, or each whole replica, before clients are served.

Otherwise the first request would wait for NIXL's handshake. All requests would wait for the compilation of
vLLM's samplers, which blocks a decode engine for seconds. There are samplers for log-probabilities, for one
request and for several.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.channel import Call, CallFailedError, ChannelLostError
from eldr_serve.engine.calls import WARM_UP_ID_PREFIX, expert_counts_of, split_expert_counts, warm_up_body
from eldr_serve.engine.methods import GENERATE, PREFILL, WAIT_FOR_COUNTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import one_line_message
from eldr_serve.fleet.measured_counts import MeasuredCounts
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.prefill.kv_release import KvRelease
from eldr_serve.pipeline.prefill.split_prefill import read_prefill_reply
from eldr_serve.router_client.client import RouterClient

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_TIMEOUT_S = 60.0
_FIRST_PERIOD_S = 0.2  # period until the first pair is warm, since the service is starting
_RETRY_S, _MAX_RETRY_S = 0.2, 10.0  # time to the next try of a pair; it doubles with each failure
_MAX_WAIT_S = 60.0  # time after the first warm pair, after which the service is ready without the others

# A prefill replica (None: whole replicas) and a decode worker; see Fleets.known_pairs.
_Pair = tuple[str | None, str]


class _NoCountsError(RuntimeError):
    """A prefill replica sends no expert counts."""


_FAILURES = (ChannelLostError, CallFailedError, RayError, RayServeException, TimeoutError, _NoCountsError)


@dataclass(frozen=True)
class _Failure:
    """The last failed try of a pair."""

    error: str
    retry_s: float
    retry_at_s: float


class Warmup:
    """Warms up each pair of live replicas, and reports the shape of their expert counts to the router."""

    def __init__(
        self, *, fleets: Fleets, handles: list[DeploymentHandle], router: RouterClient, model_id: str
    ) -> None:
        self._fleets = fleets
        self._handles = handles
        self._router = router
        self._model_id = model_id
        self._kv_release = KvRelease(fleets.prefill)
        self._warm_pairs: set[_Pair] = set()
        self._warm_workers: set[str] = set()  # decode workers that have been in a warm pair
        self._failures: dict[_Pair, _Failure] = {}
        self._engines_up = False
        self._all_were_warm = False
        self._first_warm_at_s: float | None = None

    @property
    def num_warm_pairs(self) -> int:
        """Return the number of warm pairs or whole replicas that are live."""
        return len(self._warm_pairs.intersection(self._fleets.known_pairs()))

    @property
    def all_warm(self) -> bool:
        """Return whether there are pairs that Serve knows of, and all of them are warm."""
        pairs = self._fleets.known_pairs()
        return bool(pairs) and self._warm_pairs.issuperset(pairs)

    @property
    def not_ready_reason(self) -> str | None:
        """Return why the service is not ready, one sentence; None if it is.

        At first all pairs must be warm, or one pair must have been warm for some time, since an engine that
        stays cold must not keep the others from serving. Later one warm decode engine is enough: new engines
        are warmed up during traffic, and decode engines prefill requests if no prefill engine is warm.
        """
        if self._all_were_warm or self._has_waited_for_cold_pairs:
            is_up = not self._warm_workers.isdisjoint(self._fleets.decode.live_workers)
            return None if is_up else "no decode engine is up"
        if not self._engines_up:
            return "the engines are not up yet"
        return f"{self.num_warm_pairs} of {len(self._fleets.known_pairs())} pairs of engines are warm"

    @property
    def _has_waited_for_cold_pairs(self) -> bool:
        first_at_s = self._first_warm_at_s
        return first_at_s is not None and time.monotonic() - first_at_s >= _MAX_WAIT_S

    async def run(self) -> None:
        """Keep all pairs warm until cancelled; replicas may come and go."""
        await self._wait_for_engines()
        while True:
            self._forget_lost_pairs()
            await asyncio.gather(*(self._try_pair(pair) for pair in self._due_pairs()))
            self._all_were_warm |= self.all_warm
            await asyncio.sleep(_PERIOD_S if self._warm_workers else _FIRST_PERIOD_S)

    async def _wait_for_engines(self) -> None:
        """Call each deployment, again if the called replica dies.

        After the first call through a handle, Serve publishes the replicas to the handle and this process.
        """
        while not self._engines_up:
            try:
                await asyncio.gather(*(handle.check_health.remote() for handle in self._handles))
                self._engines_up = True
            except (RayError, RayServeException) as error:
                logger.warning("the engines are not up yet: %s", one_line_message(error))
                await asyncio.sleep(_PERIOD_S)

    def _forget_lost_pairs(self) -> None:
        known_pairs = set(self._fleets.known_pairs())
        self._warm_pairs &= known_pairs
        self._warm_workers &= set(self._fleets.decode.directory.known_workers)
        self._failures = {pair: failure for pair, failure in self._failures.items() if pair in known_pairs}

    def _due_pairs(self) -> list[_Pair]:
        """Return the cold pairs whose next try is due."""
        cold_pairs = (pair for pair in self._fleets.known_pairs() if pair not in self._warm_pairs)
        now_s = time.monotonic()
        return [
            pair
            for pair in cold_pairs
            if pair not in self._failures or self._failures[pair].retry_at_s <= now_s
        ]

    async def _try_pair(self, pair: _Pair) -> None:
        prefill_replica, decode_worker = pair
        try:
            async with asyncio.timeout(_TIMEOUT_S):  # a pair that hangs must not delay the others
                if prefill_replica is None:
                    shape = await self._warm_whole(decode_worker)
                else:
                    shape = await self._warm_pair(prefill_replica, decode_worker)
        except _FAILURES as error:
            self._record_failure(pair, one_line_message(error))
            return
        self._warm_pairs.add(pair)
        self._warm_workers.add(decode_worker)
        self._failures.pop(pair, None)
        if self._first_warm_at_s is None:
            self._first_warm_at_s = time.monotonic()
        if shape is not None:
            await self._report_shape(shape)

    def _record_failure(self, pair: _Pair, error: str) -> None:
        """Set the time of the pair's next try; log the error unless the last try had the same one."""
        last = self._failures.get(pair)
        if last is None or last.error != error:
            logger.warning("pair %s-%s is not warm yet: %s", pair[0] or "whole", pair[1], error)
        retry_s = _RETRY_S if last is None else min(2 * last.retry_s, _MAX_RETRY_S)
        self._failures[pair] = _Failure(error, retry_s, time.monotonic() + retry_s)

    async def _warm_pair(self, prefill_replica: str, decode_worker: str) -> tuple[int, ...]:
        """Warm up a pair, and return the shape of its expert counts."""
        request_id = f"{WARM_UP_ID_PREFIX}{uuid.uuid4().hex}"
        request = EngineRequest("completions", warm_up_body(self._model_id), f"{request_id}-p")
        call = self._fleets.prefill.call(prefill_replica, PREFILL, request)
        reader: Call | None = None
        holds_blocks = True
        try:
            prompt = await read_prefill_reply(call)
            counts = expert_counts_of(prompt.kv_transfer_params)
            if counts is None:
                raise _NoCountsError(f"prefill replica {prefill_replica} sends no expert counts")
            reader = self._generate(decode_worker, f"{request_id}-d", prompt.kv_transfer_params)
            await _read(reader)
            holds_blocks = False
        finally:
            call.cancel()  # this has no effect on a call that has ended
            if holds_blocks:
                self._kv_release.release(request.id, prefill_replica, reader=reader)
        await _read(self._generate(decode_worker, f"{request_id}-n", answers=2))
        return counts.shape

    async def _warm_whole(self, worker: str) -> tuple[int, ...] | None:
        """Warm up a worker that prefills too, and return the shape of its expert counts if it counts any."""
        request_id = f"{WARM_UP_ID_PREFIX}{uuid.uuid4().hex}"
        shapes: list[tuple[int, ...]] = []
        call = self._fleets.decode.call(worker, WAIT_FOR_COUNTS, EngineRequest(id=request_id))
        measured_counts = MeasuredCounts(call, lambda counts, tokens: shapes.append(counts.shape))
        try:
            await _read(self._generate(worker, request_id))
            await _read(self._generate(worker, f"{request_id}-n", answers=2))
        finally:
            reading = measured_counts.finish()
        await reading
        if shapes:
            return shapes[0]
        logger.warning("replica %s counts no experts: its predictions cannot be evaluated", worker)
        return None

    async def _report_shape(self, shape: tuple[int, ...]) -> None:
        """Report the shape of expert counts; each later subscription to the router contains it too."""
        try:
            await self._router.expect_counts(*shape)
        except ACTOR_UNAVAILABLE as error:
            logger.warning("the router does not know the shape of expert counts yet: %r", error)

    def _generate(
        self, decode_worker: str, request_id: str, params: dict[str, Any] | None = None, *, answers: int = 1
    ) -> Call:
        body = warm_up_body(self._model_id, answers)
        engine_params, _ = split_expert_counts(params)
        request = EngineRequest("completions", body, request_id, kv_transfer_params=engine_params)
        return self._fleets.decode.call(decode_worker, GENERATE, request)


async def _read(call: Call) -> None:
    """Read a call to its end; cancel it if that takes too long."""
    try:
        while await call.read() is not None:
            pass
    finally:
        call.cancel()  # this has no effect on a call that has ended
