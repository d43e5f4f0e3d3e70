"""The body of a request: read and decompress it within limits, and parse its JSON."""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from typing import Any

import pydantic_core
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from eldr_serve.errors import BadRequest, Refused

MIB = 2**20
# Digits or an exponent, even in a string, that may exceed 64 bits: only then is each number checked.
_WIDE_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}")


async def read_body(headers: Headers, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Return the whole body, decompressed.

    Raises:
        Refused: the body is larger than `limit` bytes (raised as soon as that is known), arrives too slowly,
            or has a compression other than gzip.
    """
    encoding = headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise Refused(
            f"content-encoding {encoding[:40]!r} is not supported: send the body plain or as gzip", status=415
        )
    declared = headers.get("content-length", "")
    size = int(declared) if re.fullmatch(r"[0-9]{1,18}", declared) else 0
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout_s):
            while more and max(size, len(body)) <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(f"the request's body did not arrive within {timeout_s:g} s", status=408) from None
    if encoding != "identity" and len(body) <= limit:
        body = await asyncio.to_thread(_decompress, bytes(body), limit)
    if max(size, len(body)) > limit:
        raise Refused(f"the request's body is larger than {limit / MIB:g} MiB", status=413)
    return bytes(body)


def _decompress(body: bytes, limit: int) -> bytearray:
    """Return the decompressed body, at most one byte longer than `limit`."""
    found = bytearray()
    try:
        while body and len(found) <= limit:
            member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            found += member.decompress(body, limit + 1 - len(found))
            if not member.eof and len(found) <= limit:
                raise zlib.error("it ends early")
            body = member.unused_data
    except zlib.error as error:
        raise BadRequest(f"the body is not valid gzip, unlike its content-encoding: {error}") from error
    return found


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text that every engine and every answer can represent.

    NaN and Infinity are not JSON, and a lone surrogate is not Unicode. Numbers must fit in 64 bits, and the
    parser allows 200 levels of nesting.

    Raises:
        BadRequest: the body is not such JSON; one sentence.
    """
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if _WIDE_NUMBER.search(body):
        _check_numbers(value)
    return value


def _check_numbers(value: Any) -> None:
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            pending += found.values()
        elif isinstance(found, list):
            pending += found
        elif found in (math.inf, -math.inf) or (isinstance(found, int) and not _fits_64_bits(found)):
            raise BadRequest("a number in the body does not fit in 64 bits")


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63
