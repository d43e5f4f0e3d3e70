"""One token through each prefill-decode pair, before users come.

Else the first user would pay NIXL's handshake, and everybody the compilation of vLLM's samplers, for which
a decode engine stands still for seconds: with log-probabilities, and with a batch of one and of several.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from eldr_serve.serving.compat import ErrorResponse
from eldr_serve.serving.replicas import Engines
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.servers import ReleaseKv, warm_up_request
from eldr_serve.serving.wire import REPLICA, decode_request, prefill_request, signature_of, transfer_params

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_FIRST_PERIOD_S = 0.2  # until a first pair is warm: somebody waits for the service to start


class Warmup:
    """Warms each pair of live replicas once, and tells the router the shape of the signatures."""

    def __init__(
        self,
        *,
        engines: Engines,
        client: RouterClient,
        model_id: str,
    ) -> None:
        self._engines = engines
        self._client = client
        self._model_id = model_id
        self._warm: set[tuple[str, str]] = set()
        self._engines_up = False

    @property
    def pairs(self) -> int:
        """Pairs of replicas that have exchanged KV blocks."""
        return len(self._warm)

    @property
    def ready(self) -> bool:
        """Every engine that Serve knows of is up and warm."""
        return self._engines_up and not self._cold()

    def _cold(self) -> list[tuple[str, str]]:
        return [
            (p, d)
            for p in self._engines.prefill_replicas.live
            for d in self._engines.decode_replicas.live
            if (p, d) not in self._warm
        ]

    async def run(self) -> None:
        """Keep all pairs warm until cancelled; replicas may come and go."""
        # The first call through a handle also makes Serve tell it (and us) which replicas there are.
        await asyncio.gather(
            self._engines.prefill.check_health.remote(), self._engines.decode.check_health.remote()
        )
        self._engines_up = True
        while True:
            await asyncio.gather(*(self._try_pair(prefill, decode) for prefill, decode in self._cold()))
            await asyncio.sleep(_PERIOD_S if self._warm else _FIRST_PERIOD_S)

    async def _try_pair(self, prefill: str, decode: str) -> None:
        try:
            await self._warm_pair(prefill, decode)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.info("pair %s-%s is not warm yet: %r", prefill, decode, error)

    async def _warm_pair(self, prefill: str, decode: str) -> None:
        request = warm_up_request(self._model_id)
        request_id = f"warm-{uuid.uuid4().hex}"
        first_leg = prefill_request(request, f"{request_id}-p", 0)
        first_leg.kv_transfer_params[REPLICA] = prefill
        response = await anext(self._engines.prefill.options(stream=True).completions.remote(first_leg))
        if isinstance(response, ErrorResponse):
            logger.warning("prefill replica %s refused to warm up: %s", prefill, response.error.message)
            return
        params = transfer_params(response)
        counts = signature_of(params)
        if counts is None:
            logger.warning("prefill replica %s sends no expert signatures, its pairs stay cold", prefill)
            await self._engines.prefill.release_kv.remote(ReleaseKv(first_leg.request_id, {REPLICA: prefill}))
            return
        second_leg = decode_request(request, f"{request_id}-d", decode, params)
        several = request.model_copy(update={"n": 2})
        for leg in (second_leg, decode_request(several, f"{request_id}-n", decode, None)):
            async for answer in self._engines.decode.options(stream=True).completions.remote(leg):
                if isinstance(answer, ErrorResponse):
                    logger.warning("decode replica %s refused to warm up: %s", decode, answer.error.message)
                    return
        self._warm.add((prefill, decode))
        await self._client.call("expect_signatures", *counts.shape)
