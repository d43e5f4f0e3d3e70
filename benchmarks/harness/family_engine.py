"""In-process engines of several families, one after the other, each in a fork of a process that has vLLM.

Serves prompts with shared prefixes twice over few blocks, so that prefill is chunked, prefixes are found in
the cache, blocks are evicted and requests preempted. Writes what the connector counted and, for comparison,
what the routers were seen to choose for every token.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.replay_engine import free_port
from eldr_serve.engine.config import ENVIRONMENT, engine_kwargs

CHUNK = 48  # tokens a step, where blocks are not longer
OUTPUT = 6  # tokens generated a prompt


def prompts(block: int) -> list[list[int]]:
    """Token ids: two stems of whole and of broken blocks, each alone and continued in several ways."""
    rng = np.random.default_rng(0)
    stems = [rng.integers(1, 257, n).tolist() for n in (2 * block, 3 * block // 2)]
    return [stem + rng.integers(1, 257, n).tolist() for n in (0, 7, block, block + 3) for stem in stems]


class Seen:
    """What an engine's routers chose: {tokens up to and with one: its experts, sorted, layer by layer}.

    Args:
        core: an engine core in this process.
    """

    def __init__(self, core: Any) -> None:
        from eldr_serve.engine.compat import before_eplb_mapping, moe_routers

        self.choices: dict[tuple[int, ...], list[list[int]]] = {}
        self.changed = 0  # choices that a recomputation changed
        self._requests = core.scheduler.requests
        self._runner = runner = core.model_executor.driver_worker.worker.model_runner
        self._step: dict[int, list[list[int]]] = {}
        for layer, (_, router) in enumerate(moe_routers(runner.vllm_config)):
            before_eplb_mapping(router, partial(self._chose, layer))
        self._execute, runner.execute_model = runner.execute_model, self._executed

    def _chose(self, layer: int, experts: Any) -> None:
        self._step[layer] = experts.tolist()

    def _executed(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            state = getattr(self._runner, "execute_model_state", None)  # V2's has the batch's order
            batch = getattr(state, "input_batch", None) or self._runner.input_batch
            self._attribute(batch.req_ids, scheduled.num_scheduled_tokens)
        return output

    def _attribute(self, order: list[str], scheduled: dict[str, int]) -> None:
        row = 0
        for name in order:
            request = self._requests[name]
            for position in range(request.num_computed_tokens - scheduled[name], request.num_computed_tokens):
                chosen = [sorted(self._step[layer][row]) for layer in sorted(self._step)]
                known = self.choices.setdefault(tuple(request.all_token_ids[: position + 1]), chosen)
                self.changed += sum(a != b for a, b in zip(known, chosen, strict=True))
                row += 1

    def of(self, tokens: list[int]) -> list[list[list[int]]]:
        """[T,L,k]"""
        return [self.choices[tuple(tokens[: position + 1])] for position in range(len(tokens))]


def serve(model: str) -> dict[str, Any]:
    """One engine of one family; returns its report."""
    from prometheus_client import REGISTRY
    from vllm import EngineArgs, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=int(os.environ.get("BLOCKS", "40")),
            **engine_kwargs("calibrate", device="cpu"),
        ),
        UsageContext.LLM_CLASS,
    )
    core = engine.engine_core.engine_core
    seen = Seen(core)
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
        for index, prompt in enumerate(prompts(connector.counted.block_size)):
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    record = {"prompt": output.prompt_token_ids, "output": tokens}
                    record["cached"] = output.num_cached_tokens or 0
                    record["seen"] = seen.of(output.prompt_token_ids + tokens[:-1])
                    records.append(record | (output.kv_transfer_params or {}))
    samples = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    return {
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "groups": [[type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size] for g in groups],
        "records": records,
        "preemptions": samples["vllm:num_preemptions_total"],
        "changed": seen.changed,
    }


def _serve(model: str, report: str) -> None:
    try:
        found = serve(model)
    except Exception as error:
        traceback.print_exc()
        found = {"error": str(error)}
    Path(report).write_text(json.dumps(found))


def main(jobs: list[str]) -> None:
    """Each job is MODEL=REPORT; the report of an engine that does not start is {"error": the reason}."""
    import vllm.v1.engine.llm_engine  # noqa: F401

    for job in jobs:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        process = get_context("fork").Process(target=_serve, args=job.split("="))
        process.start()
        process.join()


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(sys.argv[1:])
