"""Run in-process engines of several families one after the other, each in a fork of a process with vLLM.

An engine serves prompts with shared prefixes twice over few blocks, so that prefill is chunked, prefixes are
found in the cache, blocks are evicted and requests preempted. The report has the connector's counts and, for
comparison, the routers' observed choices for every token.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import defaultdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.ports import free_port
from eldr_serve.engine.vllm.config import ENVIRONMENT, engine_kwargs

CHUNK = 48  # tokens per step, unless blocks are longer
OUTPUT = 12  # tokens generated for each prompt


def prompts(block: int) -> list[list[int]]:
    """Return token ids: stems of whole and partial blocks, each alone and with several continuations."""
    rng = np.random.default_rng(0)
    stems = [rng.integers(1, 257, n).tolist() for n in (2 * block, 3 * block // 2)]
    starts = [stem + rng.integers(1, 257, n).tolist() for n in (0, 7, block, block + 3) for stem in stems]
    return [*starts, rng.integers(1, 257, 4 * block - 5).tolist()]


class ObservedChoices:
    """The choices of an engine's routers, by the tokens up to and including the routed one.

    A token that was computed again in another batch may have several choices, by rounding near ties.
    """

    def __init__(self, core: Any) -> None:
        from eldr_serve.engine.vllm.compat.eplb import run_before_eplb_mapping
        from eldr_serve.engine.vllm.compat.moe import moe_routers

        self._choices: dict[tuple[int, ...], list[list[list[int]]]] = defaultdict(list)
        self._requests = core.scheduler.requests
        self._runner = runner = core.model_executor.driver_worker.worker.model_runner
        self._step: dict[int, list[list[int]]] = {}
        for layer, (_, router) in enumerate(moe_routers(runner.vllm_config)):
            run_before_eplb_mapping(router, partial(self._store_choices, layer))
        self._execute, runner.execute_model = runner.execute_model, self._execute_and_observe

    def _store_choices(self, layer: int, experts: Any) -> None:
        self._step[layer] = experts.tolist()

    def _execute_and_observe(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            state = getattr(self._runner, "execute_model_state", None)  # V2 has the batch's order here
            batch = getattr(state, "input_batch", None) or self._runner.input_batch
            self._attribute(batch.req_ids, scheduled.num_scheduled_tokens)
        return output

    def _attribute(self, order: list[str], scheduled: dict[str, int]) -> None:
        row = 0
        for name in order:
            request = self._requests[name]
            for position in range(request.num_computed_tokens - scheduled[name], request.num_computed_tokens):
                chosen = [sorted(self._step[layer][row]) for layer in sorted(self._step)]
                known = self._choices[tuple(request.all_token_ids[: position + 1])]
                if chosen not in known:
                    known.append(chosen)
                row += 1

    def routes(self, tokens: list[int]) -> list[list[list[list[int]]]]:
        """Return [T][choices][L][k], experts sorted."""
        return [self._choices[tuple(tokens[: position + 1])] for position in range(len(tokens))]


def serve(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one engine with these arguments, and return its report."""
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    engine = LLM(
        skip_tokenizer_init=True,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        disable_log_stats=False,
        **engine_kwargs("calibrate", device="cpu", **arguments),
    ).llm_engine
    core = engine.engine_core.engine_core
    observed = ObservedChoices(core)
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    connector = core.scheduler.connector
    params = SamplingParams(
        max_tokens=OUTPUT,
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_calibrate": True, "eldr_routes": True}},
    )
    records = []
    for turn in range(2):
        for index, prompt in enumerate(prompts(connector.kv_group.block_size)):
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    record = {"prompt": output.prompt_token_ids, "output": tokens}
                    record["cached"] = output.num_cached_tokens or 0
                    record["seen"] = observed.routes(output.prompt_token_ids + tokens[:-1])
                    records.append(record | (output.kv_transfer_params or {}))
    samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    return {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "groups": [[type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size] for g in groups],
        "step_tokens": core.scheduler.max_num_scheduled_tokens,
        "records": records,
        "preemptions": samples["vllm:num_preemptions_total"],
    }


def _serve(job: dict[str, Any], report: Path) -> None:
    try:
        if job["mla_for_amx"]:
            from eldr_serve.engine.vllm.compat.cpu_kernels import choose_mla_for_amx

            choose_mla_for_amx()
        result = serve(job["arguments"])
    except Exception as error:
        traceback.print_exc()
        result = {"error": str(error)}
    report.write_text(json.dumps(result))


def main(jobs: Path) -> None:
    """Run the jobs of a JSON file by name. Write each report to NAME.json in the file's folder.

    A job is {"arguments": engine arguments, "mla_for_amx": see Family}.
    If an engine does not start, the report is {"error": the reason}.
    """
    from vllm import LLM  # noqa: F401 - imported once, not in every fork

    for name, job in json.loads(jobs.read_text()).items():
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        report = jobs.with_name(f"{name}.json")
        process = get_context("fork").Process(target=_serve, args=(job, report))
        process.start()
        process.join()
        if not report.exists():
            error = f"the engine's process ended with status {process.exitcode}"
            report.write_text(json.dumps({"error": error}))


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(Path(sys.argv[1]))
