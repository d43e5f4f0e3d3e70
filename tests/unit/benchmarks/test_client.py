"""The client's limit of open files."""

import resource
from resource import RLIM_INFINITY

import pytest

from benchmarks.lib.client import allow_open_files


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((1024, 65536), (8192, 65536)),
        ((1024, 4096), (4096, 4096)),
        ((1024, RLIM_INFINITY), (8192, RLIM_INFINITY)),
        ((20000, 65536), (20000, 65536)),
        ((RLIM_INFINITY, RLIM_INFINITY), (RLIM_INFINITY, RLIM_INFINITY)),
    ],
)
def test_the_limit_of_open_files_is_never_lowered(
    before: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_open_files(8192)
    assert limits[-1] == expected
