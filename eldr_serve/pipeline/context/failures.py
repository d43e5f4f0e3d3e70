"""Failures of a request's attempts; the next attempt avoids the engines at fault."""

from __future__ import annotations

from dataclasses import dataclass, field

from eldr_serve.errors import one_line_message


class PrefillFailedError(Exception):
    """A prefill call has failed through no fault of the request.

    Attributes:
        replica: the prefill replica.
    """

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(f"prefill replica {replica} {reason}")
        self.replica = replica


class DecodeFailedError(Exception):
    """A decode call has ended before its answer was complete.

    Attributes:
        worker: the decode worker.
        has_begun: part of the answer had arrived over this call.
        suspect_replica: the prefill replica whose blocks may be at fault; "" if there is none.
    """

    def __init__(
        self, reason: str | Exception, worker: str, *, has_begun: bool, suspect_replica: str
    ) -> None:
        super().__init__(str(reason))
        self.worker = worker
        self.has_begun = has_begun
        self.suspect_replica = suspect_replica


@dataclass
class Failures:
    """Failures of one request's attempts.

    Attributes:
        messages: one sentence for each failure.
        prefills: number of failed prefill calls.
        decode_workers: decode workers whose calls failed.
        prefill_replicas: prefill replicas to avoid, once for each failure for which they may be at fault.
        lost_engines: number of engines that closed their channel during a call, as they do when they die.
        midstream: number of decode calls that failed after they had sent the client part of the answer.
    """

    messages: list[str] = field(default_factory=list)
    prefills: int = 0
    decode_workers: list[str] = field(default_factory=list)
    prefill_replicas: list[str] = field(default_factory=list)
    lost_engines: int = 0
    midstream: int = 0

    @property
    def attempts(self) -> int:
        """Return the number of failed attempts."""
        return self.prefills + len(self.decode_workers)

    def add_prefill(self, error: PrefillFailedError) -> None:
        """Add a failed prefill call; the next attempt uses another prefill replica."""
        self.messages.append(one_line_message(error))
        self.prefills += 1
        self.prefill_replicas.append(error.replica)

    def add_decode(self, error: DecodeFailedError, *, sent: bool) -> None:
        """Add a failed decode call.

        Args:
            sent: the client has received part of the answer.
        """
        self.messages.append(f"decode worker {error.worker} failed: {one_line_message(error)}")
        self.decode_workers.append(error.worker)
        if error.suspect_replica:
            self.prefill_replicas.append(error.suspect_replica)
        if sent and error.has_begun:
            self.midstream += 1
