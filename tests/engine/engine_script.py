"""Run the engine of `benchmarks.lib.exact_engine` as a script, and add what a test of its process needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.lib.exact_engine import BATCHES, SHORT, ExactEngine
from tests.engine.operators import Operators


def record_operators() -> Operators:
    """Record the operators that eldr_serve calls in a worker's step, except for its copies to the host."""
    from eldr_serve.engine.vllm.capture.expert_capture import ExpertCapture
    from eldr_serve.engine.vllm.capture.host_copy import HostCopies
    from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
    from eldr_serve.engine.vllm.kv.worker_side import EldrConnectorWorker
    from eldr_serve.engine.vllm.step_timer import StepTimer

    operators = Operators()
    recorded_methods: dict[type, tuple[str, ...]] = {
        ExpertCapture: ("count_last_step",),
        DeviceCapture: ("store_choices",),
        StepTimer: ("begin", "stop", "finish", "take_completed"),
        EldrConnectorWorker: ("start_step", "count_step", "take_counts"),
    }
    for owner, names in recorded_methods.items():
        for name in names:
            setattr(owner, name, operators.record_calls(getattr(owner, name)))
    HostCopies.start = operators.exclude(HostCopies.start)  # type: ignore[method-assign]
    return operators


def kernels() -> list[str]:
    """Return the names of vLLM's kernel libraries that this process has loaded."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.rpartition("/")[2] for line in mapped if "/vllm/_C" in line})


def main(model: str, out: str, asynchronous: bool, short: bool, on_host: bool) -> None:
    """Serve the batches on one engine, and write its report to the file `out`."""
    operators = record_operators()
    cores = os.sched_getaffinity(0)
    engine = ExactEngine(model, asynchronous=asynchronous, device="cpu", on_host=on_host)
    report = engine.serve(BATCHES[: SHORT if short else None])
    scheduler = engine.core.scheduler.connector.scheduler_side
    report |= {
        "kernels": kernels(),
        "operators": sorted(operators.names),
        "left_behind": [len(scheduler._tracked), len(scheduler._requests), len(scheduler._prompt_counts)],
        "cores": [sorted(cores), sorted(os.sched_getaffinity(0))],
    }
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    name, file, scheduler, batches, place = sys.argv[1:]
    main(name, file, scheduler == "async", batches == "short", place == "host")
