"""A disk that is full for this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(bytes_left: int = 1024) -> Iterator[None]:
    """Let no file of this process become larger than `bytes_left`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
