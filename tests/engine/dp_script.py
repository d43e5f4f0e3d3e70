"""Run an engine of one process, or of data-parallel ranks with expert parallelism, as a script.

One process writes its answers and counts. Ranks must answer and count the same, whichever rank runs a
request, also if other ranks are idle. If one rank dies, the engine must end. Two ranks have all experts each,
and decode steps choose the replica on the token's own rank. More ranks have replicas of some experts, among
which METRO chooses in decode steps. So do two ranks that gather their tokens before top-k.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib import tiny_model

PROMPTS, OUTPUT = 8, 10
MAX_REQUESTS = 8  # maximum requests of a rank
REPLICAS = {"fill_redundant": True, "prefill_replica_choice": "even"}
LOCAL = REPLICAS | {"redundant_experts": tiny_model.EXPERTS, "replica_choice": "local"}
METRO = REPLICAS | {"redundant_experts": 8, "replica_choice": "metro"}
Rank = int | None


def make_engine(model: str, ranks: int, role: Any = "calibrate", **others: Any) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from eldr_serve.engine.vllm.config import engine_kwargs

    shared = {"model": model, "dtype": "float32", "max_model_len": 256, "max_num_seqs": MAX_REQUESTS}
    if ranks > 1:
        others |= {"data_parallel_size": ranks, "enable_expert_parallel": True}
    kwargs = engine_kwargs(role, device="cpu", **shared, **others)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(distributed_executor_backend="uni", **kwargs))


def prompts() -> list[list[int]]:
    """Return prompts of unequal length, of which the last repeats the blocks of the first."""
    rng = np.random.default_rng(0)
    random_prompts = [rng.integers(1, 257, int(rng.integers(3, 90))).tolist() for _ in range(PROMPTS - 2)]
    stem = rng.integers(1, 257, 70).tolist()
    return [stem, *random_prompts, [*stem, 5, 7]]


class Session:
    """Requests to an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self._sent = engine, 0

    async def answers(self, rank_of: Callable[[int], Rank], at_once: bool = True) -> list[dict[str, Any]]:
        """Return tokens and counts of the prompts, in order.

        Args:
            rank_of: the rank that runs a prompt of this number; None: vLLM chooses.
            at_once: send all requests together, not one after the other.
        """
        self._sent += 1
        calls = [self._answer(number, rank_of(number)) for number in range(PROMPTS)]
        if at_once:
            return await asyncio.gather(*calls)
        return [await call for call in calls]

    async def _answer(self, number: int, rank: Rank) -> dict[str, Any]:
        *_, output = [output async for output in self.stream(number, rank, OUTPUT)]
        return {
            "tokens": list(output.outputs[0].token_ids),
            "counts": output.kv_transfer_params["eldr_prefill"],
            "decode": output.kv_transfer_params["eldr_decode"],
        }

    def stream(self, number: int, rank: Rank, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args={"kv_transfer_params": {"eldr_calibrate": True}},
        )
        prompt = {"prompt_token_ids": prompts()[number], "cache_salt": str(self._sent)}
        return self.engine.generate(prompt, params, f"{self._sent}-{number}", data_parallel_rank=rank)

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Return every rank's result. `collective_rpc` would return only the first one's."""
        by_rank = await self.engine.engine_core.call_utility_all_async(
            "collective_rpc", "eldr_experts", None, (method, *arguments), None
        )
        return [answer for (answer,) in by_rank]


async def main(model: str, expected: Path, ranks: int, gather: str = "after-top-k") -> None:
    alone = json.loads(expected.read_text())
    experts = LOCAL if ranks == 2 and gather == "after-top-k" else METRO
    settings = {"eldr_experts": experts | {"gather": gather}}
    session = Session(make_engine(model, ranks, additional_config=settings))
    spread = await session.answers(lambda number: number % ranks)
    assert spread == alone, "each rank with requests of its own"
    await check_log(session, ranks)
    if gather == "before-top-k":
        assert await session.answers(lambda number: ranks - 1) == alone, "the other rank is idle"
        session.engine.shutdown()
        return
    assert await session.answers(lambda number: None) == alone, "ranks chosen by vLLM"
    (start, _), *_ = await session.ask("batches", 0)
    last = await session.answers(lambda number: ranks - 1, at_once=False)
    assert last == alone, "one after the other on one rank, with a prefix hit"
    if experts == LOCAL:
        await check_local(session, start)
    await check_abort(session, alone, ranks)
    await check_refusals(session, ranks)
    await check_death(session, ranks)


async def check_log(session: Session, ranks: int) -> None:
    """Check that one rank serves every (token, expert) pair, and that idle ranks' tokens activate nothing."""
    from eldr_serve.engine.vllm.ep.layer import LOG_COLUMNS

    by_rank = [(end, np.array(log)) for end, log in await session.ask("batches", 0)]
    end, first = by_rank[0]
    assert first.shape == (end, tiny_model.LAYERS, len(LOG_COLUMNS))
    columns_by_rank = [dict(zip(LOG_COLUMNS, np.moveaxis(log, -1, 0), strict=True)) for _, log in by_rank]
    tokens = columns_by_rank[0]["tokens"]
    assert {other_end for other_end, _ in by_rank} == {end}
    for columns in columns_by_rank:
        assert np.array_equal(columns["tokens"], tokens)
        assert (columns["pairs_at_home"] + columns["tokens_from_other_ranks"] <= columns["pairs"]).all()
    assert np.array_equal(sum(columns["pairs"] for columns in columns_by_rank), tokens * tiny_model.TOP_K)
    computed = sum(len(prompt) + OUTPUT - 1 for prompt in prompts())
    assert (tokens.sum(axis=0) == computed).all(), "the tokens of requests, and no others"
    for routed in await session.ask("routed"):
        assert (np.sum(routed, axis=1) == computed * tiny_model.TOP_K).all()


async def check_local(session: Session, start: int) -> None:
    """Check that the last of two ranks, which had all requests since batch `start`, decoded them alone."""
    for rank, (_, log) in enumerate(await session.ask("batches", start)):
        batches = np.array(log).reshape(-1, np.shape(log)[-1])  # rows of all layers
        is_local = batches[:, 0] <= 2 * MAX_REQUESTS
        assert batches[is_local, 0].any()
        pairs = batches[is_local, 0] * tiny_model.TOP_K if rank else 0
        assert (batches[is_local, 2] == pairs).all()
        assert (batches[is_local, 3] == pairs).all(), "all at home"
        assert (batches[~is_local, 2] > 0).all(), "an even spread uses both ranks"
        assert not is_local.all()


async def check_abort(session: Session, alone: list[dict[str, Any]], ranks: int) -> None:
    """Check that other requests go on when a client leaves, and when its rank becomes idle."""
    session._sent += 1
    stream = session.stream(0, 0, 100)
    await anext(stream)
    others = asyncio.create_task(session.answers(lambda number: number % ranks))
    await anext(stream)
    await stream.aclose()
    assert await others == alone


async def check_refusals(session: Session, ranks: int) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="data_parallel_rank"):
        await anext(session.stream(0, ranks, 1))
    for refusal in await session.ask("choose", "metro"):
        assert "while they serve" in refusal


async def check_death(session: Session, ranks: int) -> None:
    """Check that every request fails when the last rank is killed, and none waits for it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    session._sent += 1
    streams = [session.stream(rank, rank, 150) for rank in range(ranks)]
    for stream in streams:
        await anext(stream)
    os.kill(session.engine.engine_core.resources.engine_manager.processes[-1].pid, signal.SIGKILL)

    async def rest(stream: Any) -> None:
        async for _ in stream:
            pass

    for ended in await asyncio.wait_for(asyncio.gather(*map(rest, streams), return_exceptions=True), 60):
        assert isinstance(ended, EngineDeadError), ended
    with pytest.raises(EngineDeadError):
        await session.engine.check_health()
    session.engine.shutdown()


async def write_alone(model: str, answers: Path) -> None:
    session = Session(make_engine(model, 1))
    answers.write_text(json.dumps(await session.answers(lambda number: None)))
    session.engine.shutdown()


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # scheduler and model of a rank in one process
    if sys.argv[2] == "alone":
        asyncio.run(write_alone(sys.argv[1], Path(sys.argv[3])))
    else:
        asyncio.run(main(sys.argv[1], Path(sys.argv[3]), int(sys.argv[2]), *sys.argv[4:]))
