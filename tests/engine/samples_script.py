"""Collect samples of requests served under pressure, and calibration counts of the same prompts.

    python samples_script.py MODEL OUT decode|whole PROMPTS

A decode engine reads its prompts' blocks from a prefill engine over NIXL.
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

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.calls import split_expert_counts
from eldr_serve.engine.protocol import EngineRequest, Sampling
from eldr_serve.experts.signature import pack_counts
from tests.engine import contract_script
from tests.engine.contract_script import RemoteEngine, end, nixl, serve, start

CHUNK = 48  # tokens per step: longer prompts are prefilled in pieces
BLOCKS = 24  # blocks of 32 tokens, too few for the concurrent requests, so that some are preempted
AT_ONCE = 8
TOKENS = 40  # length of an answer
DISCONNECTS_AFTER = 3  # tokens after which a client disconnects


def prompts(num_prompts: int) -> list[list[int]]:
    """Return prompts of various lengths.

    Every third shares a prefix with an earlier one. Every seventh equals one.
    """
    rng, token_ids = np.random.default_rng(39), []
    for number in range(num_prompts):
        tokens = rng.integers(1, 257, int(rng.integers(5, 150))).tolist()
        if number and number % 7 == 0:
            tokens = token_ids[number - 5]
        elif number > 2 and number % 3 == 0:
            tokens = token_ids[number - 3][:64] + tokens
        token_ids.append(tokens)
    return token_ids


class Client:
    """A client that sends completion requests with token ids, like the serving code."""

    def __init__(self, engine: Any, prefills: Any) -> None:
        self._engine, self._prefills = engine, prefills
        self._one_prefill = asyncio.Lock()  # the pipe handles one call at a time
        self.generated: dict[str, list[int]] = {}

    def _request(self, name: str, prompt: list[int], **more: Any) -> EngineRequest:
        body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        return EngineRequest("completions", json.dumps(body).encode(), name, domain="d", **more)

    async def send(self, name: str, prompt: list[int], *, sampled: bool, leaves: bool = False) -> None:
        """Generate an answer. Disconnect early if `leaves`."""
        more: dict[str, Any] = {"sampled": sampled}
        if self._prefills is not None:
            async with self._one_prefill:
                answer = await self._prefills.prefill(self._request(name, prompt))
            params, counts = split_expert_counts(answer.kv_transfer_params)
            more |= {
                "expert_counts": counts,
                "kv_transfer_params": params,
                "token_ids": answer.token_ids.tobytes(),
            }
        ids, enough = bytearray(), asyncio.Event()

        def on_chunk(payload: bytes, tokens: int, made: bytes = b"") -> None:
            ids.extend(made)
            if len(ids) >= 4 * DISCONNECTS_AFTER:
                enough.set()

        call = asyncio.create_task(self._engine.generate(self._request(name, prompt, **more), on_chunk))
        if leaves:
            await enough.wait()
            call.cancel()
            await asyncio.wait([call])
            return
        await call
        self.generated[name] = np.frombuffer(ids, np.uint32).tolist()


async def check(role: Any, model: str, num_prompts: int, prefills: Connection | None) -> dict[str, Any]:
    contract_script.KWARGS |= {
        "max_num_seqs": AT_ONCE,
        "max_num_batched_tokens": CHUNK,
        "num_gpu_blocks_override": BLOCKS,
    }
    engine: Any = await start(role, model)
    client = Client(engine, None if prefills is None else RemoteEngine(prefills))
    waiting = asyncio.Semaphore(AT_ONCE)

    async def send(number: int, prompt: list[int]) -> None:
        async with waiting:
            await client.send(f"{number}", prompt, sampled=number % 4 != 3, leaves=number % 5 == 4)

    await asyncio.gather(*(send(*numbered) for numbered in enumerate(prompts(num_prompts))))
    samples = engine.take_samples()
    from prometheus_client import REGISTRY

    values = {s.name: s.value for family in REGISTRY.collect() for s in family.samples}
    report = {
        "samples": [
            {
                "id": sample.request_id,
                "domain": sample.domain,
                "prompt": sample.token_ids.tolist(),
                "generated": client.generated[sample.request_id],
                "prefill": pack_counts(sample.prefill_counts),
                "decode": pack_counts(sample.decode_counts),
                "steps": sample.decode_steps,
            }
            for sample in samples
        ],
        "preemptions": values.get("vllm:num_preemptions_total"),
    }
    end(engine)
    return report


def calibrate(model: str, pipe: Connection) -> None:
    """Count the experts of each [prompt, answer length] in a calibrating engine."""
    settings, environment = BACKEND.calibration_settings(model, "cpu", dict(contract_script.KWARGS))
    os.environ |= environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = BACKEND.start_calibration(settings, nixl())
    asked = pipe.recv()
    sampling = [Sampling(TOKENS, 0.0, ignore_eos=True)] * len(asked)
    pipe.send(engine.calibrate(asked, sampling))


def main(model: str, out: Path, role: str, num_prompts: int) -> None:
    fork = get_context("fork")
    (parent_end, child_end), (calibration, calibrating) = fork.Pipe(), fork.Pipe()
    children = [fork.Process(target=calibrate, args=(model, calibrating))]
    if role == "decode":
        children.append(fork.Process(target=lambda: asyncio.run(serve(model, child_end))))
    for child in children:
        child.start()
    child_end.close()
    calibrating.close()
    report = asyncio.run(check(role, model, num_prompts, parent_end if role == "decode" else None))
    calibration.send([sample["prompt"] for sample in report["samples"]])
    report["calibrated"] = calibration.recv()
    if role == "decode":
        parent_end.send(None)
    for child in children:
        child.join()
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
