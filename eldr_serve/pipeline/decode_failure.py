"""Failures of decode calls: which of them the request survives, and which replica is at fault."""

from __future__ import annotations

from typing import Any

from eldr_serve.channel import CallFailed, CallLate, ChannelLost
from eldr_serve.pipeline.request_context import RequestContext
from eldr_serve.replicas.outliers import ReplicaHealth


class DecodeFailed(Exception):  # noqa: N818
    """A decode call has ended before its answer was complete.

    Attributes:
        replica: the decode replica.
        alive: the replica reported the failure itself.
        begun: part of the answer had arrived by this call.
    """

    def __init__(self, reason: Any, replica: str, *, alive: bool, begun: bool) -> None:
        super().__init__(f"{reason}")
        self.replica = replica
        self.alive = alive
        self.begun = begun


def record_failure(
    context: RequestContext,
    health: ReplicaHealth,
    replica: str,
    error: CallLate | CallFailed | ChannelLost,
    *,
    begun: bool,
) -> None:
    """Record that a decode call of the replica has failed.

    Args:
        begun: part of the answer had arrived by this call.

    Raises:
        DecodeFailed: the answer is not complete.
        CallFailed: the engine refuses the request itself.
    """
    alive = isinstance(error, CallFailed)
    if isinstance(error, ChannelLost):
        context.lost_engines += 1
    else:
        if isinstance(error, CallLate):
            alive = not begun  # before the first token the blocks may be at fault
        elif not context.sent and not begun and error.status < 500:
            raise error
        health.failed(replica, error)
    if not context.complete:
        raise DecodeFailed(error, replica, alive=alive, begun=begun) from error
