"""Ray's settings where Ray is started."""

import re

import pytest
import yaml

from eldr_serve.config.ray_settings import QUIET
from tests.support.shipped import ROOT


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "ray_cluster_local.yaml"])
def test_a_cluster_file_starts_ray_with_exactly_our_settings(name: str) -> None:
    document = yaml.safe_load((ROOT / name).read_text())
    commands = document["head_start_ray_commands"] + document["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert starts
    for command in starts:
        assert dict(re.findall(r"\b(RAY_SERVE_\w+|RAY_[a-z]\w+)=(\S+)", command)) == QUIET
