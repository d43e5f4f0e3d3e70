"""Client of the signature pool's actors, in a decode replica."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from eldr_serve.actors import find_actor
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.signatures.settings import pool_actor_name

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0


class SampleSender:
    """Sends samples to the actors of an application's signature pool.

    Samples for an unreachable actor are dropped, since new requests provide new samples.

    Args:
        application: name of the application, part of the actors' names.
        num_actors: number of actors in the pool, at least 1. The request id of a sample determines its actor.
        find: returns the handle of a named actor or raises ValueError. It is called in a thread, because
            Ray's look-up blocks while GCS is unavailable.

    Attributes:
        sent: number of samples that the pool has accepted.
        dropped: number of samples that could not be delivered.
    """

    def __init__(self, application: str, num_actors: int, find: Callable[[str], Any] = find_actor) -> None:
        self.sent = self.dropped = 0
        self._names = [pool_actor_name(application, index) for index in range(num_actors)]
        self._find = find
        self._handles: dict[int, Any] = {}
        self._shares = [1.0] * num_actors  # share in each actor's last answer
        self._unreachable: set[int] = set()

    async def add(self, samples: list[ExpertSample]) -> float:
        """Send samples; return the share of requests to sample next, the mean over the actors.

        Without samples, ask all actors for their share. An unreachable actor counts with its last share.
        """
        parts: dict[int, list[ExpertSample]] = {} if samples else {i: [] for i in range(len(self._names))}
        for sample in samples:
            index = zlib.crc32(sample.request_id.encode(errors="surrogatepass")) % len(self._names)
            parts.setdefault(index, []).append(sample)
        await asyncio.gather(*(self._send(index, part) for index, part in parts.items()))
        return sum(self._shares) / len(self._shares)

    async def _send(self, index: int, samples: Sequence[ExpertSample]) -> None:
        try:
            if index not in self._handles:
                self._handles[index] = await asyncio.to_thread(self._find, self._names[index])
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                self._shares[index] = float(await self._handles[index].add.remote(list(samples)))
        except (ValueError, RayError, TimeoutError) as error:
            self.dropped += len(samples)
            if isinstance(error, ActorDiedError):  # this is final: a restarted actor keeps its handle
                self._handles.pop(index, None)
            if index not in self._unreachable:
                self._unreachable.add(index)
                logger.warning(
                    "%s cannot be reached, so its samples are dropped: %r", self._names[index], error
                )
            return
        self.sent += len(samples)
        if index in self._unreachable:
            self._unreachable.discard(index)
            logger.info("%s takes samples again; %d were dropped so far", self._names[index], self.dropped)
