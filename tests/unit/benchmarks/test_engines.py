"""Processes that benchmarks start."""

import os
import signal
import time
from pathlib import Path

import psutil

from benchmarks.lib.engines import _server_command, start_process


def test_a_server_uses_our_core_share_and_ends_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_process(["bash", "-c", "sleep 60 & echo $!; wait"], env={}, log=log) as server:
        while not log.read_text().strip():
            time.sleep(0.01)
        child = psutil.Process(int(log.read_text()))
        assert os.getsid(server.pid) == os.getsid(child.pid) == os.getsid(0)
    assert server.returncode == -signal.SIGTERM  # not killed after a wait
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_a_plain_server_gets_no_flag_for_an_argument_that_is_none() -> None:
    config = {"model_loading_config": {"model_source": "model"}}
    kwargs = {
        "seed": None,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "additional_config": {"a": 1},
    }
    command = _server_command(config, kwargs, 8000)
    assert "None" not in command
    assert command[-4:] == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--additional-config",
        '{"a": 1}',
    ]
