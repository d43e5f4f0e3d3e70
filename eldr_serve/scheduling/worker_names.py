"""Names of decode workers: a worker is a replica, or one data-parallel rank of its engine.

The ranks of a replica's engine are workers `replica/0`, `replica/1`, ...; an engine without data parallelism
is one worker with the name of its replica.
"""

from __future__ import annotations

_SEPARATOR = "/"  # no replica's name contains it


def worker_names(replica: str, ranks: int) -> list[str]:
    """Return the workers of a replica whose engine has this number of data-parallel ranks."""
    return [replica] if ranks <= 1 else [f"{replica}{_SEPARATOR}{rank}" for rank in range(ranks)]


def replica_of(worker: str) -> str:
    """Return the replica of a worker; a replica's own name is returned unchanged."""
    return worker.partition(_SEPARATOR)[0]


def rank_of(worker: str) -> int | None:
    """Return the data-parallel rank of a worker; None if it is a whole replica."""
    _, found, rank = worker.partition(_SEPARATOR)
    return int(rank) if found else None
