"""Hand prompts from each data-parallel rank of a prefill engine to each rank of a decode engine.

Each also hands one to a rank that vLLM chooses.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.ports import free_port
from tests.engine.dp_script import make_engine

RANKS, LENGTH, OUTPUT = 2, 150, 8
PATIENCE_S = 120.0


def engine(role: str, model: str) -> Any:
    # Each rank listens at this port plus its number.
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    }
    return make_engine(model, RANKS, role)


async def run(engine: Any, name: str, prompt: Any, rank: int | None, tokens: int, params: Any = None) -> Any:
    """Return vLLM's last output of a request, on a rank that vLLM chooses if `rank` is None."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra
    )
    async with asyncio.timeout(PATIENCE_S):
        stream = engine.generate(prompt, sampling, name, data_parallel_rank=rank)
        *_, output = [output async for output in stream]
    return output


async def prefill(model: str, pipe: Connection) -> None:
    """Prefill requests from the pipe until one is None."""
    prefiller = engine("prefill", model)
    while (request := await asyncio.to_thread(pipe.recv)) is not None:
        name, prompt, rank = request
        output = await run(prefiller, name, {"prompt_token_ids": prompt}, rank, 1, {"do_remote_decode": True})
        pipe.send(output.kv_transfer_params)
    prefiller.shutdown()


async def main(model: str, pipe: Connection) -> list[dict[str, Any]]:
    from eldr_serve.experts.signature import unpack_counts

    decoder = engine("decode", model)
    rng, report = np.random.default_rng(0), []
    for prefill_rank in range(RANKS):
        for decode_rank in (*range(RANKS), None):
            prompt, name = rng.integers(1, 257, LENGTH).tolist(), f"{prefill_rank}-{decode_rank}"
            pipe.send((name, prompt, prefill_rank))
            params = await asyncio.to_thread(pipe.recv)
            counts = unpack_counts(params.pop("eldr_expert_counts"))
            pulled = await run(decoder, name, {"prompt_token_ids": prompt}, decode_rank, OUTPUT, params)
            alone = {"prompt_token_ids": prompt, "cache_salt": "computed here"}
            other = None if decode_rank is None else 1 - decode_rank
            computed = await run(decoder, f"{name}-alone", alone, other, OUTPUT)
            report.append(
                {
                    "rank": prefill_rank,
                    "engine": params["remote_engine_id"],
                    "port": params["remote_port"],
                    "counted": int(counts.sum()),
                    "pulled": list(pulled.outputs[0].token_ids),
                    "computed": list(computed.outputs[0].token_ids),
                }
            )
    pipe.send(None)
    decoder.shutdown()
    return report


if __name__ == "__main__":
    from eldr_serve.engine.vllm.config import ENVIRONMENT

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    fork = get_context("fork")
    mine, theirs = fork.Pipe()
    child = fork.Process(target=lambda: asyncio.run(prefill(sys.argv[1], theirs)))
    child.start()
    theirs.close()  # then recv raises if the child dies
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(main(sys.argv[1], mine))))
    child.join()
