"""Exceptions for refused requests and configurations.

The message of every exception that this package raises for bad input is one sentence.
"""

from __future__ import annotations

import json

from pydantic import ValidationError


class UserInputError(ValueError):
    """Unusable user input; the message is one sentence."""


class ServiceFailedError(RuntimeError):
    """A service failed a request through no fault of the command's user; the message is one sentence."""


class ConfigurationError(UserInputError):
    """The deployment YAML is invalid or cannot be served.

    Attributes:
        field: the engine argument with which the message begins; None if it begins with something else.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SwapRefusedError(UserInputError):
    """A new table or policy was rejected; the old one stays live."""


class RequestRefusedError(RuntimeError):
    """A request is refused with an HTTP status.

    Attributes:
        kind: `type` of the error in the answer; derived from the status by default.
        param: `param` of the error, the invalid field of the request; None if no single field is at fault.
    """

    kind: str | None = None

    def __init__(
        self, message: str, *, status: int, retry_after_s: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(RequestRefusedError):
    """The request is invalid; no engine can serve it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, status=400, param=param)


class OverloadedError(RequestRefusedError):
    """There is no capacity now; the client should retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message, status=status, retry_after_s=retry_after_s)


class EnginesLostError(RequestRefusedError):
    """The request may be the cause of the loss of several engines. It should not be sent again."""

    kind = "engines_lost"

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500)


class RateLimitedError(RequestRefusedError):
    """The tenant has used up one of its limits for the next `retry_after_s` seconds."""

    kind = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, status=429, retry_after_s=retry_after_s)


def one_line_message(error: BaseException) -> str:
    """Return an error's message as one line of bounded length and valid UTF-8."""
    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{where}: {first['msg']}" if where else first["msg"]
    text = " ".join(text.split()).encode(errors="replace").decode()
    return text if len(text) <= 500 else f"{text[:497]}..."


def error_body(message: str, status: int, kind: str | None = None, param: str | None = None) -> bytes:
    """Return an error in OpenAI's JSON format; `kind` is its `type`, derived from the status by default."""
    kinds = {429: "overloaded", 503: "overloaded", 500: "internal_error"}
    kind = kind or kinds.get(status, "invalid_request_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()
