"""Processes that benchmarks start."""

import os
import time
from pathlib import Path

import psutil

from benchmarks.lib.engines import start_process


def test_a_server_uses_our_core_share_and_ends_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_process(["bash", "-c", "sleep 60 & echo $!; wait"], env={}, log=log) as server:
        while not log.read_text().strip():
            time.sleep(0.01)
        child = psutil.Process(int(log.read_text()))
        assert os.getsid(server.pid) == os.getsid(child.pid) == os.getsid(0)
    assert server.poll() is not None
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
