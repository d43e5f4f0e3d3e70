"""The body of a request, which is read and decompressed within limits, and its parsed JSON."""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pydantic_core
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from eldr_serve.errors import BadRequestError, OverloadedError, RequestRefusedError

MIB = 2**20
_PART_BYTES = 256 * 1024  # bytes that one step reads from a gzip body
_MAX_MEMBERS = 64  # maximum members of a gzip body: clients send one, and concatenated files have a few
# Finds digits or an exponent that may exceed 64 bits, even in a string; else, numbers are not checked.
_WIDE_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}")


class BodyBudget:
    """Bounds the total size of the request bodies in memory.

    A body stays in memory until its request ends, since another engine may need it.

    Args:
        on_refusal: called when a body does not fit.

    Attributes:
        used: bytes of the bodies in memory now.
    """

    def __init__(self, max_bytes: int, on_refusal: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._on_refusal = on_refusal

    def take(self, num_bytes: int) -> None:
        """Use part of the budget; raise OverloadedError if not enough is left."""
        if self.used + num_bytes > self.max_bytes:
            self._on_refusal()
            raise OverloadedError(
                "the bodies of all requests in the ingress together exceed "
                f"{self.max_bytes / MIB:g} MiB: send the request again later"
            )
        self.used += num_bytes


class BodyShare:
    """The part of the budget that one request's body uses, and a context manager that returns it.

    It counts the body as received and as decompressed, until one of them is dropped.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._used = 0

    def add(self, num_bytes: int) -> None:
        """Use more of the budget; raise OverloadedError if not enough is left."""
        self._budget.take(num_bytes)
        self._used += num_bytes

    def reduce_to(self, num_bytes: int) -> None:
        """Return all but `num_bytes` to the budget."""
        self._budget.used -= self._used - num_bytes
        self._used = num_bytes

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *raised: object) -> None:
        self.reduce_to(0)


async def read_body(
    headers: Headers,
    receive: Receive,
    limit: int,
    timeout_s: float,
    reserve: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """Return the whole body, decompressed.

    Args:
        timeout_s: maximum time until the whole body has arrived, s. Decompression
            has no time limit, since the sizes bound it.
        reserve: called with the number of further bytes before they are kept; may raise an exception.

    Raises:
        RequestRefusedError: the body is larger than `limit` bytes (raised as soon as that is known), arrives
            too slowly, or has a compression other than gzip.
    """
    encoding = headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise RequestRefusedError(
            f"content-encoding {encoding[:40]!r} is not supported: send the body plain or as gzip", status=415
        )
    declared = headers.get("content-length", "")
    size = int(declared) if re.fullmatch(r"[0-9]{1,18}", declared) else 0
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(timeout_s):
            while more and max(size, len(body)) <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part = message.get("body", b"")
                reserve(len(part))
                body += part
                more = message.get("more_body", False)
    except TimeoutError:
        raise RequestRefusedError(
            f"the request's body did not arrive within {timeout_s:g} s", status=408
        ) from None
    if encoding != "identity" and max(size, len(body)) <= limit:
        body = await _decompress(bytes(body), limit, reserve)
    if max(size, len(body)) > limit:
        raise RequestRefusedError(f"the request's body is larger than {limit / MIB:g} MiB", status=413)
    return bytes(body)


async def _decompress(body: bytes, limit: int, reserve: Callable[[int], None]) -> bytearray:
    """Return the decompressed body, or its beginning if the whole is longer than `limit`."""
    decompressed = bytearray()
    parts = _decompressed_parts(body)
    try:
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            reserve(len(part))
            decompressed += part
            if len(decompressed) > limit:
                break
    except zlib.error as error:
        raise BadRequestError(f"the body with content-encoding gzip is not gzip: {error}") from error
    return decompressed


def _decompressed_parts(body: bytes) -> Iterator[bytes]:
    """Yield the decompressed body in parts of at most `_PART_BYTES`, after equal steps through `body`."""
    members = 0
    member = None
    for start in range(0, len(body), _PART_BYTES):
        pending = body[start : start + _PART_BYTES]
        full = False
        while pending or full:
            if member is None or member.eof:
                members += 1
                if members > _MAX_MEMBERS:
                    raise zlib.error(f"it has more than {_MAX_MEMBERS} members")
                member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            part = member.decompress(pending, _PART_BYTES)
            pending = member.unused_data if member.eof else member.unconsumed_tail
            full = len(part) == _PART_BYTES and not member.eof  # zlib may hold more
            yield part
    if member is not None and not member.eof:
        raise zlib.error("it ends early")


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text that every engine and every answer can represent.

    It may contain neither NaN nor Infinity, which are not JSON, nor a lone surrogate, which is not Unicode.
    Numbers must fit in 64 bits, and the parser allows 200 levels of nesting.

    Raises:
        BadRequestError: the body is not such JSON.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if _WIDE_NUMBER.search(body):
        _check_numbers(value)
    return value


def _check_numbers(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif item in (math.inf, -math.inf) or (isinstance(item, int) and not _fits_64_bits(item)):
            raise BadRequestError("a number in the body does not fit in 64 bits")


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63
