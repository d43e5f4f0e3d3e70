"""Processes that benchmarks start, and the arguments of their engines."""

import os
import signal
import time
from pathlib import Path

import psutil

from benchmarks.lib.engines import _server_command, change_nixl_ports, start_process


def test_a_server_uses_our_core_share_and_ends_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_process(["bash", "-c", "sleep 60 & echo $!; wait"], env={}, log=log) as server:
        while not log.read_text().strip():
            time.sleep(0.01)
        child = psutil.Process(int(log.read_text()))
        assert os.getsid(server.pid) == os.getsid(child.pid) == os.getsid(0)
    assert server.returncode == -signal.SIGTERM  # it was not killed after a wait
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


def test_the_second_application_has_its_own_ports_and_keeps_every_other_argument() -> None:
    port, interval = "NIXL_SIDE_CHANNEL_PORT_BASE", {"stream_batching_interval_ms": 0}
    arguments = {
        "prefill_config": {"a": 1, "experimental_configs": interval},
        "decode_config": {"b": 2, "experimental_configs": interval | {port: 20000}},
        "router": {},
    }

    other = change_nixl_ports(arguments)

    experimental = {
        role: other[role].pop("experimental_configs") for role in ("prefill_config", "decode_config")
    }
    ports = {configs.pop(port) for configs in experimental.values()}
    assert len(ports - {20000}) == 2
    assert experimental == dict.fromkeys(experimental, interval)
    assert other == {"prefill_config": {"a": 1}, "decode_config": {"b": 2}, "router": {}}
    assert arguments["prefill_config"]["experimental_configs"] == interval
    assert "prefill_config" not in change_nixl_ports({"decode_config": {}})  # whole replicas
