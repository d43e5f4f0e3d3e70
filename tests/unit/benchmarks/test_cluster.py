"""The separate Ray of a benchmark."""

import os
import sys
from contextlib import suppress
from unittest.mock import Mock

import pytest

from benchmarks.lib.cluster import local_ray


@pytest.mark.parametrize("error", [None, OSError("no port is free")])
def test_local_ray_restores_the_environment(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Mock(init=Mock(side_effect=error))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("benchmarks.lib.cluster.logging", Mock())  # local_ray sets its levels
    monkeypatch.setenv("A_VARIABLE", "before")
    before = dict(os.environ)
    for _ in range(2):
        with suppress(OSError), local_ray(environment={"A_VARIABLE": "within", "ANOTHER": "within"}):
            assert os.environ["A_VARIABLE"] == os.environ["ANOTHER"] == "within"
        assert dict(os.environ) == before
    assert ray.shutdown.call_count == 2


def test_ray_ends_although_serve_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Mock(shutdown=Mock(side_effect=OSError("the controller is dead")))
    ray = Mock(serve=serve)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("benchmarks.lib.cluster.logging", Mock())
    before = dict(os.environ)
    with pytest.raises(OSError, match="the controller is dead"), local_ray(http_port=1):
        pass
    ray.shutdown.assert_called_once()
    assert dict(os.environ) == before
