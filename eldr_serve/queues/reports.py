"""Reports that a worker sends to the ingresses about its queue, once per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eldr_serve.queues.throughput import Throughput


@dataclass(frozen=True)
class QueueReport:
    """A worker's measurements of its queue.

    Attributes:
        number: sequence number of the report.
        tokens: number of tokens of all ingresses' prompts that the worker has not computed yet.
        rate: throughput, tokens/s; 0 if not known yet.
        num_ingresses: number of ingresses that have a channel to its replica.
        calls: number of open calls of all ingresses that need a slot.
        measured_s: busy time over which the rate was measured, s.
    """

    number: int = -1
    tokens: float = 0.0
    rate: float = 0.0
    num_ingresses: int = 1
    calls: int = 0
    measured_s: float = 0.0

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> QueueReport:
        """Parse a worker's report. Ignore unknown fields, which a replica of another version may send."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


class PromptMeter(Throughput):
    """Measures, in a replica, the prompts that all ingresses have sent to one of its workers."""

    def report(self, number: int, *, num_ingresses: int, calls: int) -> QueueReport:
        """Return the worker's report of its queue."""
        return QueueReport(
            number=number,
            tokens=self.outstanding,
            rate=self.rate or 0.0,
            num_ingresses=num_ingresses,
            calls=calls,
            measured_s=self.measured_s,
        )
