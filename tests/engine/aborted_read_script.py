"""Abort requests some steps after the decode engine has received them.

    python aborted_read_script.py MODEL OUT left|overwritten STEPS...

`Blocks` says what the prefill engine does with a prompt's blocks before the read. OUT gets the results of
each number of steps, in the given order. All use the same two engines, but other prompts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.transfer_script import PATIENCE_S, engine, run

ROUNDS, LENGTH, OUTPUT = 6, 200, 6
BLOCKS = 24  # KV blocks of the prefill engine; a prompt has 7


class Blocks(StrEnum):
    """State of a prompt's blocks in the prefill engine when the decode engine reads them."""

    LEFT = "left"
    OVERWRITTEN = "overwritten"  # the blocks were freed, and filled with other prompts


class InvalidBlockWarnings(logging.Handler):
    """A handler that counts NIXL's log messages about invalid blocks."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Potentially invalid KV blocks" in record.getMessage()


def prefill(arguments: dict[str, Any], pipe: Connection) -> None:
    """Answer commands [name, argument] from the pipe, and run engine steps in between."""
    from eldr_serve.engine.vllm.compat.nixl import get_kv_transfer_group

    core = engine("prefill", arguments)
    warnings = InvalidBlockWarnings()
    logging.getLogger("vllm").addHandler(warnings)  # the engine's start has configured logging
    prompts_to_send = get_kv_transfer_group().connector_worker._reqs_to_send
    pipe.send(None)
    number = 0
    while True:
        core.step()
        if not pipe.poll(0.001):
            continue
        what, argument = pipe.recv()
        if what == "prompt":
            number += 1
            params = {"do_remote_decode": True, "eldr_request": argument["name"]}
            output = run(core, f"p{number}", {"prompt_token_ids": argument["prompt"]}, 1, params)
            pipe.send(output.kv_transfer_params)
        elif what == "fill":  # prompts that are not requested again
            for prompt in argument:
                number += 1
                run(core, f"f{number}", {"prompt_token_ids": prompt}, 1)
            pipe.send(None)
        elif what == "abandon":
            get_kv_transfer_group().abandon([argument])
            core.step()
            pipe.send(None)
        elif what == "counts":
            pipe.send((warnings.count, len(prompts_to_send)))


def main(model: str, out: str, blocks: Blocks, all_steps: list[int]) -> None:
    arguments = {"model": model, "dtype": "float32", "max_model_len": 512}
    parent_end, child_end = get_context("fork").Pipe()
    limits = {"num_gpu_blocks_override": BLOCKS}
    process = get_context("fork").Process(target=prefill, args=(arguments | limits, child_end), daemon=True)
    process.start()
    decoder = engine("decode", arguments | {"num_gpu_blocks_override": 160})
    parent_end.recv()

    def ask(what: str, argument: Any = None) -> Any:
        parent_end.send((what, argument))
        return parent_end.recv()

    rng = np.random.default_rng(0)
    results = [abort_all(decoder, ask, rng, blocks, steps) for steps in all_steps]
    Path(out).write_text(json.dumps(results))
    process.kill()
    process.join()


def abort_all(
    decoder: Any, ask: Any, rng: np.random.Generator, blocks: Blocks, steps: int
) -> dict[str, float]:
    """Abort one request after the other, each after this number of steps, and return what is wrong then."""
    warnings_before, _ = ask("counts")
    wrong_answers = 0
    for number in range(ROUNDS):
        name = f"{steps}-{number}"
        prompt, *others = rng.integers(1, 257, (4, LENGTH)).tolist()
        params = ask("prompt", {"name": f"n{name}", "prompt": prompt})
        begin(decoder, f"a{name}", prompt, params)
        if blocks is Blocks.OVERWRITTEN:
            ask("abandon", f"n{name}")
            ask("fill", others)
        for _ in range(steps):
            decoder.step()
        decoder.abort_request([f"a{name}"], internal=False)
        settle(decoder, ask)
        params = ask("prompt", {"name": f"again{name}", "prompt": prompt})
        by_transfer = run(decoder, f"d{name}", {"prompt_token_ids": prompt}, OUTPUT, params)
        alone = {"prompt_token_ids": prompt, "cache_salt": f"computed here {name}"}
        by_itself = run(decoder, f"c{name}", alone, OUTPUT)
        wrong_answers += list(by_transfer.outputs[0].token_ids) != list(by_itself.outputs[0].token_ids)
    warnings, held_prompts = settle(decoder, ask)
    usage = decoder.engine_core.engine_core.scheduler.kv_cache_manager.usage
    results = {"invalid_block_warnings": warnings - warnings_before, "held_prompts": held_prompts}
    return results | {"decode_kv_usage": usage, "wrong_answers": wrong_answers}


def begin(decoder: Any, name: str, prompt: list[int], params: Any) -> None:
    """Add a request that reads its prompt's blocks from the prefill engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=OUTPUT, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": params}
    )
    decoder.add_request(name, {"prompt_token_ids": prompt}, sampling)


def settle(decoder: Any, ask: Any) -> tuple[int, int]:
    """Run steps until no engine holds blocks. Return the numbers of warnings and of held prompts."""
    end = time.monotonic() + PATIENCE_S / 4
    core = decoder.engine_core.engine_core
    while True:
        decoder.step()
        core.step_fn()  # an idle engine, which keeps stepping in a replica
        warnings, held_prompts = ask("counts")
        if (not held_prompts and not core.scheduler.kv_cache_manager.usage) or time.monotonic() > end:
            for _ in range(20):  # wait for a notice in transit
                decoder.step()
                core.step_fn()
                warnings, held_prompts = ask("counts")
            return warnings, held_prompts


if __name__ == "__main__":
    from eldr_serve.engine.vllm.config import ENVIRONMENT

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(sys.argv[1], sys.argv[2], Blocks(sys.argv[3]), [*map(int, sys.argv[4:])])
