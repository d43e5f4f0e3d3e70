"""Hand prompts from a prefill to a decode engine of one family, each in its own process."""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.ports import free_port

TOKENS = (70, 200, 331)  # prompt lengths
OUTPUT = 8
PATIENCE_S = 60.0


def engine(role: Any, arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from eldr_serve.engine.vllm.config import engine_kwargs

    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    given = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    kwargs = engine_kwargs(role, device="cpu", **given, **arguments)
    return LLMEngine.from_engine_args(EngineArgs(**kwargs), UsageContext.LLM_CLASS)


def run(engine: Any, name: str, prompt: Any, tokens: int, params: Any = None) -> Any:
    """Return vLLM's output of one request."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra
    )
    engine.add_request(name, prompt, sampling)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for output in engine.step():
            if output.finished:
                return output
    raise TimeoutError(f"{name} did not end")


def prefill(arguments: dict[str, Any], pipe: Connection) -> None:
    """Prefill requests from the pipe and keep stepping, since transfers progress only in engine steps."""
    core = engine("prefill", arguments)
    pipe.send(None)
    while True:
        if pipe.poll(0.001):
            name, prompt = pipe.recv()
            output = run(core, name, {"prompt_token_ids": prompt}, 1, {"do_remote_decode": True})
            pipe.send((output.prompt_token_ids, output.kv_transfer_params))
        core.step()


def main(arguments: dict[str, Any], out: Path) -> None:
    from eldr_serve.experts.signature import unpack_counts

    parent_end, child_end = get_context("fork").Pipe()
    process = get_context("fork").Process(target=prefill, args=(arguments, child_end), daemon=True)
    process.start()
    decoder = engine("decode", arguments)
    parent_end.recv()
    rng, transfers = np.random.default_rng(0), []
    for length in TOKENS:
        prompt = rng.integers(1, 257, length).tolist()
        parent_end.send((f"p{length}", prompt))
        answered, params = parent_end.recv()
        num_counts = int(unpack_counts(params.pop("eldr_expert_counts")).sum())
        pulled = run(decoder, f"d{length}", {"prompt_token_ids": prompt}, OUTPUT, params)
        alone = {"prompt_token_ids": prompt, "cache_salt": "computed here"}
        computed = run(decoder, f"c{length}", alone, OUTPUT)
        groups = [len(blocks) for blocks in params["remote_block_ids"]]
        transfers.append(
            {
                "groups": groups,
                "counted": num_counts,
                "answered_prompt": answered == prompt,
                "pulled": list(pulled.outputs[0].token_ids),
                "computed": list(computed.outputs[0].token_ids),
            }
        )
    out.write_text(json.dumps(transfers))
    process.kill()
    process.join()


if __name__ == "__main__":
    from eldr_serve.engine.vllm.config import ENVIRONMENT

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
