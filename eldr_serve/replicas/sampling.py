"""Sampling of requests for the signature pool, in a decode replica."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from eldr_serve.engine.protocol import TakesMeasurements
from eldr_serve.replicas.sample_sender import SampleSender

MAX_SAMPLED = 16  # maximum number of sampled requests in one engine at a time
_PERIOD_S = 1.0  # interval between calls to the pool
# While the share is below 1, the pool is asked for it again after this many periods without samples.
_REFRESH_PERIODS = 10


class Sampler:
    """Chooses which requests are sampled.

    At most MAX_SAMPLED sampled requests run at a time; while there are as many, no other request is sampled.
    Otherwise the hash of the request id decides, so that a retry gets the same decision.

    Attributes:
        share: share of requests to sample, 0 to 1; set by the pool.
        running: number of sampled requests in progress.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.running = 0

    @contextmanager
    def track(self, request_id: str) -> Iterator[bool]:
        """Yield whether the request is sampled. It counts as running until the context ends."""
        sampled = self.running < MAX_SAMPLED and _fraction(request_id) < self.share
        self.running += sampled
        try:
            yield sampled
        finally:
            self.running -= sampled


def _fraction(request_id: str) -> float:
    """Return a number in [0, 1) that depends only on the id."""
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8, person=b"sample")
    return int.from_bytes(digest.digest()) / 2**64


async def send_samples(engine: TakesMeasurements, sampler: Sampler, pool: SampleSender) -> None:
    """Send the engine's samples to the pool and apply the share that it returns, until cancelled."""
    idle = 0  # periods since the last call
    while True:
        await asyncio.sleep(_PERIOD_S)
        samples = engine.take_samples()
        idle += 1
        if samples or (sampler.share < 1 and idle >= _REFRESH_PERIODS):
            idle = 0
            sampler.share = min(1.0, max(0.0, await pool.add(samples)))
