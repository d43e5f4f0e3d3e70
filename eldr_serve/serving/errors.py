"""The ways in which serving says no, each one sentence."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """The deployment YAML asks for what cannot be served."""


class SwapRefused(ValueError):  # noqa: N818 - it is an answer, not a fault of ours
    """A table or a policy was not taken; the old one stays live."""


class Overloaded(RuntimeError):  # noqa: N818
    """No capacity now: the client should try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
