"""A scheduler that records the steps of data-parallel ranks. An engine names it as `scheduler_cls`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.barrier.steps import RECORD_FOLDER_ENV, steps_file
from eldr_serve.engine.vllm.compat.ep_ranks import rank_batches
from eldr_serve.engine.vllm.scheduler import EldrAsyncScheduler


class RecordingScheduler(EldrAsyncScheduler):
    """The decode engines' scheduler, which also writes a line for each step of its rank.

    A line is a JSON list of four numbers: the number of the step's forward pass, which is the same on all
    ranks, the rank's requests, the KV tokens that they attend to, and time.perf_counter() when the step was
    scheduled. Steps without requests have no line. RECORD_FOLDER_ENV is the variable that names the folder.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        path = steps_file(Path(os.environ[RECORD_FOLDER_ENV]), vllm_config.parallel_config.data_parallel_rank)
        self._steps = path.open("w", buffering=1)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and write its line."""
        output = super().schedule(*args, **kwargs)
        if scheduled := output.num_scheduled_tokens:
            # Scheduler and model run in one process, so all earlier forwards have begun.
            forward = rank_batches().forwards + 1
            kv_tokens = sum(self.requests[name].num_computed_tokens for name in scheduled)
            line = [forward, len(scheduled), kv_tokens, time.perf_counter()]
            self._steps.write(f"{json.dumps(line)}\n")
        return output
