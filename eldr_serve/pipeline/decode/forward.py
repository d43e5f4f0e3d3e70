"""Requests that generate nothing, such as embeddings: one decode engine answers them with one call."""

from __future__ import annotations

import random

from eldr_serve.channel import CallTimeoutError
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.errors import OverloadedError
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.fleet.outliers import OutlierDetector


async def forward(fleet: Fleet, outliers: OutlierDetector, request: EngineRequest, timeout_s: float) -> bytes:
    """Return the answer of the least loaded decode engine that is not ejected.

    Raises:
        OverloadedError: no engine can be reached, or the engine gave no answer in time.
        CallFailedError, ChannelLostError: see Call.read.
    """
    open_calls = fleet.open_calls
    if not open_calls:
        raise OverloadedError("no decode replica can be reached: send the request again")
    worker = min(outliers.usable_workers, key=lambda name: (open_calls[name], random.random()))
    call = fleet.call(worker, request.method, request)
    call.set_timeouts(timeout_s, timeout_s)  # the times count from now, since the call waits for no slot
    try:
        answer = await call.read()
    except CallTimeoutError as error:
        raise OverloadedError(
            f"the decode engine did not answer within {timeout_s:g} s: send the request again"
        ) from error
    finally:
        call.cancel()
    if answer is None or not answer.payload:
        raise OverloadedError("the decode engine's answer was empty: send the request again")
    return answer.payload
