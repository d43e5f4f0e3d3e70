"""Published decode routes of GPT-OSS-20B as a calibration trace.

The records have decode steps only. The first steps stand in for the prompt, the next ones are the decode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.command_errors import BadInput
from eldr_serve.experts.calibration_trace import CalibrationTrace
from loadgen.lines import numbered_lines

LAYERS, EXPERTS, TOP_K = 24, 32, 4
_VALUE = np.full(256, 255, np.uint8)
_VALUE[np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", np.uint8)] = np.arange(EXPERTS)


def read_gptoss(path: Path, *, prompt_steps: int = 96, decode_steps: int = 64) -> CalibrationTrace:
    """Read the records that have enough steps from JSON lines, plain or gzip.

    Raises:
        BadInput: the file cannot be read, or a line, which the message names, is not a record of routes.
    """
    steps = prompt_steps + decode_steps
    long = [(record, routes[:steps]) for record, routes in read_records(path) if len(routes) >= steps]
    if not long:
        raise BadInput(f"{path} has no record of {steps} steps")
    records = [record for record, _ in long]
    kept = np.stack([routes for _, routes in long])  # [N, T, L, k]
    return CalibrationTrace(
        "gpt-oss-20b", TOP_K, _counts(kept[:, :prompt_steps]), _counts(kept[:, prompt_steps:]),
        np.full(len(kept), decode_steps, np.uint32), np.full(len(kept), prompt_steps, np.uint32),
        [str(record["domain"]) for record in records], [str(record["id"]) for record in records],
        kept[:, prompt_steps:].reshape(-1, LAYERS, TOP_K), np.arange(len(kept) + 1) * decode_steps,
    )  # fmt: skip


def read_records(path: Path) -> list[tuple[dict[str, Any], NDArray[np.uint8]]]:
    """Read each record and its routes uint8[T, L, k] from JSON lines, plain or gzip.

    Raises:
        BadInput: as `read_gptoss`.
    """
    return [_record(path, number, line) for number, line in numbered_lines(path)]


def _record(path: Path, number: int, line: str) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    try:
        record = json.loads(line)
        routes = _VALUE[np.frombuffer(record["routes"].encode(), np.uint8)].reshape(-1, LAYERS, TOP_K)
        if routes.size and routes.max() >= EXPERTS:
            raise ValueError("a letter names no expert")
        record["id"], record["domain"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}, line {number}: not a record of routes ({error!r})") from error
    return record, routes


def _counts(routes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return uint32[N, L, E] of routes[N, T, L, k]."""
    counts = np.zeros((len(routes), LAYERS, EXPERTS), np.uint32)
    n, layer = np.ogrid[: len(routes), :LAYERS]
    for step in range(routes.shape[1]):
        for rank in range(TOP_K):
            counts[n, layer, routes[:, step, :, rank]] += 1
    return counts
