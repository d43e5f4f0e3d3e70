"""The log of a Serve replica survives the import of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPLICA = """
import logging, logging.config, logging.handlers, sys
import ray.serve
logger = logging.getLogger("ray.serve")
logger.addHandler(logging.handlers.MemoryHandler(1, target=logging.FileHandler(sys.argv[1])))
import eldr_serve.replicas.llm_servers
assert "vllm" in sys.modules
logger.warning("after import")
from eldr_serve.replicas.kept_log import kept_log
with kept_log():
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
logger.warning("after start")
"""


def test_a_replica_still_logs_after_its_engine_is_imported_and_started(tmp_path: Path) -> None:
    """Serve sets its log up before it unpickles a deployment's class; an engine reconfigures logging.

    tests/e2e/test_when_engines_die.py kills the controller of a whole application.
    """
    log = tmp_path / "replica.log"
    done = subprocess.run(
        [sys.executable, "-c", _REPLICA, str(log)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "after import\nafter start\n"
