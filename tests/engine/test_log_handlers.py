"""The log of a Serve replica survives the import of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.processes import output

_REPLICA = """
import logging, logging.config, logging.handlers, sys
import ray.serve
logger = logging.getLogger("ray.serve")
logger.addHandler(logging.handlers.MemoryHandler(1, target=logging.FileHandler(sys.argv[1])))
import eldr_serve.replicas.llm_servers
assert "vllm" in sys.modules
logger.warning("after import")
from eldr_serve.replicas.log_handlers import restore_log_handlers
with restore_log_handlers():
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
logger.warning("after start")
"""


def test_a_replica_still_logs_after_its_engine_is_imported_and_started(tmp_path: Path) -> None:
    """Serve sets its log up before it unpickles a deployment's class. An engine reconfigures logging.

    tests/e2e/test_when_engines_die.py kills the controller of a whole application.
    """
    log = tmp_path / "replica.log"
    output(sys.executable, "-c", _REPLICA, log, timeout_s=240)
    assert log.read_text() == "after import\nafter start\n"
