"""Warm-up requests for each prefill-decode pair, or each whole replica, before clients are served.

Otherwise the first request would wait for NIXL's handshake, and all requests for the compilation of vLLM's
samplers, which blocks a decode engine for seconds: samplers for log-probabilities, for one request and for
several.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from eldr_serve.channel import Call, CallFailedError, ChannelLostError
from eldr_serve.channel.actors import ACTOR_UNAVAILABLE
from eldr_serve.engine.calls import WARM_UP_ID_PREFIX, expert_counts_of, split_expert_counts, warm_up_body
from eldr_serve.engine.methods import GENERATE, PREFILL, WAIT_FOR_COUNTS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.fleet.measured_counts import MeasuredCounts
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.prefill.kv_release import KvRelease
from eldr_serve.pipeline.prefill.split_prefill import read_prefill_reply
from eldr_serve.router_client.client import RouterClient

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_TIMEOUT_S = 60.0
_FIRST_PERIOD_S = 0.2  # period until the first pair is warm, since the service is starting


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
        self._warm_pairs: set[tuple[str | None, str]] = set()  # see Fleets.known_pairs
        self._engines_up = False
        self._all_were_warm = False

    @property
    def num_warm_pairs(self) -> int:
        """Return the number of warm pairs or whole replicas that are live."""
        return len(self._warm_pairs.intersection(self._fleets.known_pairs()))

    @property
    def ready(self) -> bool:
        """Return whether all engines that Serve knows of are up and warm."""
        return self._engines_up and not self._cold_pairs()

    @property
    def not_ready_reason(self) -> str | None:
        """Return why the service is not ready, one sentence; None if it is.

        At first all pairs must be warm. Later one warm decode engine is enough: new engines are warmed up
        during traffic, and decode engines prefill requests if no prefill engine is warm.
        """
        if self._all_were_warm:
            warm_workers = {decode for _, decode in self._warm_pairs}
            is_up = not warm_workers.isdisjoint(self._fleets.decode.live_workers)
            return None if is_up else "no decode engine is up"
        if not self._engines_up:
            return "the engines are not up yet"
        pairs = self._fleets.known_pairs()
        return f"{len(pairs) - len(self._cold_pairs())} of {len(pairs)} pairs of engines are warm"

    def _cold_pairs(self) -> list[tuple[str | None, str]]:
        return [pair for pair in self._fleets.known_pairs() if pair not in self._warm_pairs]

    async def run(self) -> None:
        """Keep all pairs warm until cancelled; replicas may come and go."""
        # After the first call through a handle, Serve publishes the replicas to the handle and this process.
        await asyncio.gather(*(handle.check_health.remote() for handle in self._handles))
        self._engines_up = True
        while True:
            known_workers = set(self._fleets.decode.directory.known_workers)
            self._warm_pairs = {
                (prefill, decode) for prefill, decode in self._warm_pairs if decode in known_workers
            }
            await asyncio.gather(*(self._try_pair(prefill, decode) for prefill, decode in self._cold_pairs()))
            self._all_were_warm |= bool(self._warm_pairs) and not self._cold_pairs()
            await asyncio.sleep(_PERIOD_S if self._warm_pairs else _FIRST_PERIOD_S)

    async def _try_pair(self, prefill: str | None, decode: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):  # a pair that hangs must not delay the others
                if prefill is None:
                    await self._warm_whole(decode)
                else:
                    await self._warm_pair(prefill, decode)
        except (ChannelLostError, CallFailedError, RayError, RayServeException, TimeoutError) as error:
            logger.warning("pair %s-%s is not warm yet: %s", prefill or "whole", decode, error)

    async def _warm_pair(self, prefill: str, decode: str) -> None:
        request_id = f"{WARM_UP_ID_PREFIX}{uuid.uuid4().hex}"
        request = EngineRequest("completions", warm_up_body(self._model_id), f"{request_id}-p")
        call = self._fleets.prefill.call(prefill, PREFILL, request)
        reader: Call | None = None
        holds_blocks = True
        try:
            prompt = await read_prefill_reply(call)
            counts = expert_counts_of(prompt.kv_transfer_params)
            if counts is None:
                logger.warning("prefill replica %s sends no expert counts; its pairs stay cold", prefill)
                return
            reader = self._generate(decode, f"{request_id}-d", prompt.kv_transfer_params)
            await _read(reader)
            holds_blocks = False
        finally:
            call.cancel()  # this has no effect on a call that has ended
            if holds_blocks:
                self._kv_release.release(request.id, prefill, reader=reader)
        await _read(self._generate(decode, f"{request_id}-n", answers=2))
        self._warm_pairs.add((prefill, decode))
        await self._report_shape(counts.shape)

    async def _warm_whole(self, decode: str) -> None:
        request_id = f"{WARM_UP_ID_PREFIX}{uuid.uuid4().hex}"
        shapes: list[tuple[int, ...]] = []
        call = self._fleets.decode.call(decode, WAIT_FOR_COUNTS, EngineRequest(id=request_id))
        measured_counts = MeasuredCounts(call, lambda counts, tokens: shapes.append(counts.shape))
        try:
            await _read(self._generate(decode, request_id))
            await _read(self._generate(decode, f"{request_id}-n", answers=2))
        finally:
            reading = measured_counts.finish()
        await reading
        self._warm_pairs.add((None, decode))
        if shapes:
            await self._report_shape(shapes[0])
        else:
            logger.warning("replica %s counts no experts: its predictions cannot be evaluated", decode)

    async def _report_shape(self, shape: tuple[int, ...]) -> None:
        """Report the shape of expert counts; each later subscription to the router contains it too."""
        try:
            await self._router.expect_counts(*shape)
        except ACTOR_UNAVAILABLE as error:
            logger.warning("the router does not know the shape of expert counts yet: %r", error)

    def _generate(
        self, decode: str, request_id: str, params: dict[str, Any] | None = None, *, answers: int = 1
    ) -> Call:
        body = warm_up_body(self._model_id, answers)
        engine_params, _ = split_expert_counts(params)
        request = EngineRequest("completions", body, request_id, kv_transfer_params=engine_params)
        return self._fleets.decode.call(decode, GENERATE, request)


async def _read(call: Call) -> None:
    """Read a call to its end; cancel it if that takes too long."""
    try:
        while await call.read() is not None:
            pass
    finally:
        call.cancel()  # this has no effect on a call that has ended
