"""The ways in which serving says no, each one sentence."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """The deployment YAML asks for what cannot be served."""


class SwapRefused(ValueError):  # noqa: N818 - it is an answer, not a fault of ours
    """A table or a policy was not taken; the old one stays live."""


class Refused(RuntimeError):  # noqa: N818
    """A request that is not served, and the HTTP status that says why."""

    def __init__(self, message: str, *, status: int, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class BadRequest(Refused):
    """No engine could serve this request, now or later."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400)


class Overloaded(Refused):
    """No capacity now: the client should try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message, status=status, retry_after_s=retry_after_s)
