"""The latency objective of a request, from its headers or its tenant's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eldr_serve.errors import BadRequestError

TTFT_HEADER, TPOT_HEADER = "x-eldr-ttft-ms", "x-eldr-tpot-ms"
MAX_MS = 3_600_000.0  # one hour, longer than any answer may take
MILLISECONDS = r"[0-9]{1,9}(\.[0-9]{1,9})?"  # pattern of the values of these headers


@dataclass(frozen=True)
class Objective:
    """Latencies that an answer should have; None means that any latency will do.

    Attributes:
        ttft_s: time from the request's admission to the first token, s.
        tpot_s: mean time between tokens, s.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self != Objective()


def objective_of(headers: Mapping[str, str], default: Objective) -> Objective:
    """Return the objective of a request; the tenant's default replaces a missing header.

    Args:
        headers: headers of the request, by their names in lower case.

    Raises:
        BadRequestError: a header is not a number of milliseconds.
    """
    ttft_s, tpot_s = _seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER)
    if ttft_s is None and tpot_s is None:
        return default
    return Objective(
        default.ttft_s if ttft_s is None else ttft_s, default.tpot_s if tpot_s is None else tpot_s
    )


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    milliseconds = float(value) if re.fullmatch(MILLISECONDS, value) else 0.0
    if not 0 < milliseconds <= MAX_MS:
        raise BadRequestError(
            f"the header {name} is {value[:40]!r}: send a number of milliseconds above 0 and at most "
            f"{MAX_MS:.0f}, such as 500",
            param=name,
        )
    return milliseconds / 1000
