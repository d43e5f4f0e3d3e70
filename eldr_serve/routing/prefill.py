"""Which prefill replica takes a prompt: by prefix hash, unless it is too loaded."""

from __future__ import annotations

import hashlib


def choose_prefill(
    head: bytes, in_flight: dict[str, int], *, max_load_ratio: float = 1.25, attempt: int = 0
) -> str:
    """The replica for a prompt that begins with `head`.

    The replica is the one that ranks first by rendezvous hash, so that a replica that comes or goes
    moves only its own share of prefixes. It is passed over for the least loaded one if, with this
    request, it would hold more than `max_load_ratio` times the mean; of equally loaded ones for the next
    in rank, so that one prefix overflows to one replica, and another prefix to another. `attempt` n > 0
    takes the n-th next in rank, after a failure of the ones before.
    """
    ranked = sorted(
        in_flight, key=lambda name: hashlib.blake2b(name.encode() + b"\0" + head, digest_size=8).digest()
    )
    if attempt:
        return ranked[attempt % len(ranked)]
    mean = (sum(in_flight.values()) + 1) / len(in_flight)
    if in_flight[ranked[0]] + 1 <= max(1.0, max_load_ratio * mean):
        return ranked[0]
    return min(ranked, key=lambda name: in_flight[name])
