"""One trial: a policy serves requests in a closed loop, and a period of it is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.barrier.steps import RankSteps
from benchmarks.lib.client import Answer, Send, count_failures, open_session
from eldr_serve.errors import UserInputError

_TIMEOUT_S = 120.0  # slower requests count as failed


@dataclass(frozen=True)
class ClosedLoop:
    """The load of every trial.

    Attributes:
        slots: requests that a rank runs at once.
        in_flight: requests in flight over all ranks.
        warm_up_s, seconds: lengths of the load before the measured period and of that period, in seconds.
    """

    slots: int
    in_flight: int
    warm_up_s: float
    seconds: float


@dataclass(frozen=True)
class BarrierTrial:
    """The results of a trial.

    Attributes:
        sent: number of requests that were sent in the whole trial.
        number: int64[n], numbers of the measured requests in the order of sending: those that were answered
            and ended in the measured period.
        tpot_ms, ttft_ms: float64[n].
        steps: steps of the measured period.
        errors: number of failures in the whole trial, by message.
    """

    sent: int
    number: NDArray[np.int64]
    tpot_ms: NDArray[np.float64]
    ttft_ms: NDArray[np.float64]
    steps: RankSteps
    errors: dict[str, int]

    @classmethod
    def from_answers(
        cls, load: ClosedLoop, start_s: float, sent: int, answers: Mapping[int, Answer], steps: RankSteps
    ) -> BarrierTrial:
        """Return the measured part.

        Args:
            start_s: start of the load, a time of time.perf_counter().
            answers: all answers that have ended, by number.
            steps: all steps of the ranks.

        Raises:
            UserInputError: no request was answered in the measured period.
        """
        from_s = start_s + load.warm_up_s
        until_s = from_s + load.seconds
        failures = count_failures([*answers.values()])
        measured = sorted(
            n for n, a in answers.items() if a.error is None and from_s <= a.ended_at_s < until_s
        )
        if not measured:
            raise UserInputError(f"no request ended in the measured period; failures: {failures}")
        timings = [answers[n].timing for n in measured]
        return cls(
            sent,
            np.array(measured),
            np.array([1e3 * (timing.tpot_s or np.nan) for timing in timings]),
            np.array([1e3 * (timing.ttft_s or np.nan) for timing in timings]),
            steps.select_period(from_s, until_s),
            failures,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict from which `from_json` restores the trial."""
        lists = {name: getattr(self, name).tolist() for name in ("number", "tpot_ms", "ttft_ms")}
        return {"sent": self.sent, **lists, "steps": self.steps.to_json(), "errors": self.errors}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> BarrierTrial:
        """Restore the trial of `to_json`."""
        arrays = {name: np.array(stored[name]) for name in ("number", "tpot_ms", "ttft_ms")}
        return cls(
            sent=stored["sent"], **arrays, steps=RankSteps.from_json(stored["steps"]), errors=stored["errors"]
        )


async def timed_loop(
    send: Send, bodies: Iterator[dict[str, Any]], *, in_flight: int, seconds: float
) -> tuple[float, int, dict[int, Answer]]:
    """Send requests in a closed loop for the given time, and then abandon the incomplete answers.

    Args:
        bodies: an endless iterator of requests.

    Returns:
        The start (a time of time.perf_counter()), the number of requests sent, and the answers that have
        ended, by number.
    """
    answers: dict[int, Answer] = {}
    sent = 0

    async def send_in_turn(http: Any) -> None:
        nonlocal sent
        for body in bodies:
            number, sent = sent, sent + 1
            answers[number] = await send(http, body)

    async with open_session(_TIMEOUT_S) as http:
        start_s = time.perf_counter()
        users = [asyncio.create_task(send_in_turn(http)) for _ in range(in_flight)]
        done, _ = await asyncio.wait(users, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    for user in done:  # `send` stores the errors of requests, so this is a fault of this code
        user.result()
    return start_s, sent, answers
