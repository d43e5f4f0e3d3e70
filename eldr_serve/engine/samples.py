"""The expert samples of a replica's finished requests, until they are sent to the signature pool."""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
from numpy.typing import NDArray

from eldr_serve.engine.protocol import MAX_SAMPLES, EngineRequest
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import unpack_counts

logger = logging.getLogger(__name__)


class SampleBuffer:
    """The newest samples of an engine.

    Args:
        size: maximum number of samples; when the buffer is full, a new sample replaces the oldest.

    Attributes:
        dropped: samples dropped since the start.
    """

    def __init__(self, size: int = MAX_SAMPLES) -> None:
        self.dropped = 0
        self._samples: deque[ExpertSample] = deque(maxlen=size)

    def put(
        self, request: EngineRequest, token_ids: NDArray[np.uint32], prefill: str, decode: str, steps: int
    ) -> None:
        """Add the sample of a finished request. Ignore a request without decode steps or prefill counts.

        Args:
            prefill, decode: packed counts. Counts that are malformed or differ in shape come from another
                model, and no sample is added.
        """
        if not steps or not prefill:
            return
        try:
            prefill_counts, decode_counts = unpack_counts(prefill), unpack_counts(decode)
        except ValueError as error:
            logger.warning("no sample of request %s: %s", request.id, error)
            return
        if prefill_counts.shape != decode_counts.shape:
            logger.warning(
                "no sample of request %s: its prefill counts have shape %s, but this engine's have %s",
                request.id,
                prefill_counts.shape,
                decode_counts.shape,
            )
            return
        if len(self._samples) == self._samples.maxlen:
            self.dropped += 1
        self._samples.append(
            ExpertSample(request.id, request.domain, token_ids, prefill_counts, decode_counts, steps)
        )

    def take_all(self) -> list[ExpertSample]:
        """Remove and return all samples, oldest first."""
        samples = list(self._samples)
        self._samples.clear()
        return samples
