"""The ways in which serving says no, each one sentence."""

from __future__ import annotations

import json

from pydantic import ValidationError


class ConfigurationError(ValueError):
    """The deployment YAML asks for what cannot be served."""


class SwapRefused(ValueError):  # noqa: N818 - it is an answer, not a fault of ours
    """A table or a policy was not taken; the old one stays live."""


class Refused(RuntimeError):  # noqa: N818
    """A request that is refused, with an HTTP status.

    Attributes:
        kind: `type` of the error in the answer; derived from the status by default.
        param: `param` of the error, the field of the request that is at fault; None if no single field is.
    """

    kind: str | None = None

    def __init__(
        self, message: str, *, status: int, retry_after_s: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(Refused):
    """No engine could serve this request, now or later."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, status=400, param=param)


class Overloaded(Refused):
    """No capacity now: the client should try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message, status=status, retry_after_s=retry_after_s)


class RateLimited(Refused):
    """The tenant has used up a limit of its own: nothing is left for `retry_after_s` seconds."""

    kind = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, status=429, retry_after_s=retry_after_s)


def sentence(error: BaseException) -> str:
    """What an error says, in one line of bounded length that any answer can carry."""
    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{where}: {first['msg']}" if where else first["msg"]
    text = " ".join(text.split()).encode(errors="replace").decode()
    return text if len(text) <= 500 else f"{text[:497]}..."


def error_body(message: str, status: int, kind: str | None = None, param: str | None = None) -> bytes:
    """Return an OpenAI-like error as JSON; `kind` is its `type`, derived from the status by default."""
    kinds = {429: "overloaded", 503: "overloaded", 500: "internal_error"}
    kind = kind or kinds.get(status, "invalid_request_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()
