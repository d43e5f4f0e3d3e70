"""The choice of a prefill replica by a hash of the prompt's prefix, with a bound on its load."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def choose_prefill_replica(
    prefix: bytes,
    in_flight: dict[str, int],
    *,
    max_load_ratio: float = 1.25,
    failed_replicas: Sequence[str] = (),
) -> str:
    """Return the replica for a prompt that begins with `prefix`.

    Rendezvous hashing ranks the replicas, so that a replica that is added or removed moves only its own
    share of prefixes. If the first one would exceed `max_load_ratio` times the mean load with this request,
    the least loaded replica is returned; rank breaks ties, so that different prefixes overflow to different
    replicas.

    Args:
        failed_replicas: replicas that failed the prompt, once for each failure. If there are any, the
            first in rank of those with the fewest failures is returned.
    """
    ranked = sorted(
        in_flight, key=lambda name: hashlib.blake2b(name.encode() + b"\0" + prefix, digest_size=8).digest()
    )
    if failed_replicas:
        return min(ranked, key=failed_replicas.count)
    mean = (sum(in_flight.values()) + 1) / len(in_flight)
    if in_flight[ranked[0]] + 1 <= max(1.0, max_load_ratio * mean):
        return ranked[0]
    return min(ranked, key=lambda name: in_flight[name])
