"""Compare the prefix hits that the router predicts with the engines' own, on a trace's conversations.

    python -m benchmarks.serving.prefix_hits --trace mooncake_conversation.jsonl.gz

Users have conversations with two whole replicas whose caches are too small for all conversations. A turn's
prompt is the previous prompt, its answer as the engine generated it, and new tokens. Lengths and prefixes
that conversations share are those of the trace, divided by SHRINK of benchmarks/lib/whole/workloads.py.

The router predicts the cached tokens of a prompt when it places the request, and the engine reports the true
number (`prefix_tokens_predicted` and `prefix_tokens_measured` of the status). `map` is `events` if engines
report their blocks, and `estimate` if the router only knows the prompts that it has sent. With events,
`error_pct` should be within 5 %.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.client import open_session
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.engines import our_arguments
from benchmarks.lib.live import serve_shortest_queue_without_pool
from benchmarks.lib.prompts import MODEL
from benchmarks.lib.whole.workloads import SHRINK, SHRINK_ANSWERS, conversations
from eldr_serve.commands.run import run
from eldr_serve.errors import ServiceFailedError, UserInputError
from loadgen.results import publish
from loadgen.traces import BLOCK_TOKENS, RecordedArrival, read_arrival_trace

BENCHMARKS = {"prefix_hits": "all"}
MAPS = {"events": None, "estimate": {"enable_kv_cache_events": False}}
_TOKEN_IDS = range(100, 2000)  # token ids of prompts
_COUNTERS = ("prefill_tokens", "prefix_tokens_predicted", "prefix_tokens_measured")
_REPORTS_S = 3.0  # time in which ingresses and engines report to the router
_TIMEOUT_S = 120.0


def first_prompt(turn: RecordedArrival, seed: int) -> list[int]:
    """Return the token ids of a prompt. Ids of a prefix block depend only on the block's id in the trace."""
    ids: list[int] = []
    for block in turn.hash_ids:
        rng = np.random.default_rng((seed, block))
        ids += rng.integers(_TOKEN_IDS.start, _TOKEN_IDS.stop, BLOCK_TOKENS // SHRINK).tolist()
    return ids[: max(1, turn.prompt_tokens // SHRINK)]


def next_prompt(
    history: Sequence[int], before: RecordedArrival, turn: RecordedArrival, rng: random.Random
) -> list[int]:
    """Return the prompt after a history, with as many new tokens as in the trace."""
    new = turn.prompt_tokens - before.prompt_tokens - before.output_tokens
    return [*history, *rng.choices(_TOKEN_IDS, k=max(1, new // SHRINK))]


async def _answer(http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> list[int]:
    """Return the token ids of an answer. Raise ServiceFailedError if the request fails."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    async with http.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as response:
        if response.status != 200:
            raise ServiceFailedError(f"HTTP {response.status}: {(await response.text())[:200]}")
        ids: list[int] = (await response.json())["choices"][0]["token_ids"]
        return ids


async def converse(
    url: str,
    chosen: Sequence[list[RecordedArrival]],
    *,
    in_flight: int,
    think_s: float,
    longest: int,
    seed: int,
) -> int:
    """Run these conversations, `in_flight` at a time, and return the number of requests."""
    rng, requests, waiting = random.Random(seed), 0, iter(chosen)

    async def user(http: aiohttp.ClientSession) -> None:
        nonlocal requests
        for turns in waiting:
            history: list[int] = []
            for number, turn in enumerate(turns):
                tokens = max(1, turn.output_tokens // SHRINK_ANSWERS)
                if number:
                    await asyncio.sleep(think_s * rng.expovariate(1.0))
                    prompt = next_prompt(history, turns[number - 1], turn, rng)
                else:
                    prompt = first_prompt(turn, seed)
                if len(prompt) + tokens > longest:
                    break
                requests += 1
                history = prompt + await _answer(http, url, prompt, tokens)

    async with open_session(_TIMEOUT_S) as http:
        await asyncio.gather(*(user(http) for _ in range(in_flight)))
    return requests


def make_row(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Make a row of hit rates between two readings of counters, and their relative difference, in %."""
    prompts, predicted, measured = (after.get(name, 0) - before.get(name, 0) for name in _COUNTERS)
    rates = {"predicted_pct": 100 * predicted / prompts, "measured_pct": 100 * measured / prompts}
    error = 100 * (predicted / measured - 1) if measured else float("nan")
    return {"prompt_tokens": prompts, **rates, "error_pct": error}


def prefix_hits(
    trace: Annotated[Path, typer.Option(help="Mooncake trace with prefix blocks.")],
    maps: Annotated[str, typer.Option(help="Maps, comma-separated: events, estimate.")] = "events,estimate",
    policy: Annotated[str, typer.Option(help="Policy of the router.")] = "marginal-cost",
    sessions: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 60,
    in_flight: options.InFlight = 12,
    think_seconds: Annotated[float, typer.Option(min=0, help="Mean time between turns, s.")] = 1.0,
    blocks: Annotated[int, typer.Option(min=64, help="KV blocks of an engine, of 32 tokens.")] = 192,
    deployment: options.Deployment = Path("deployments/cpu_demo_whole.yaml"),
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("examples/demo_model/weights"),
    port: options.Ports = 8370,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare predicted and measured prefix hits of two whole replicas."""
    unwind_on_sigterm()
    for name in (names := maps.split(",")):
        if name not in MAPS:
            raise UserInputError(f"there is no map {name!r}; there are {', '.join(MAPS)}")
    records = read_arrival_trace(trace)
    if not all(record.hash_ids for record in records):
        raise UserInputError(f"{trace} names no prefix blocks; give Mooncake's conversation trace")
    all_conversations = conversations(records)
    chosen = random.Random(seed).sample(all_conversations, min(sessions, len(all_conversations)))
    arguments = our_arguments(deployment, model, decode_replicas=2)
    kwargs = arguments["decode_config"]["engine_kwargs"] | {"num_gpu_blocks_override": blocks}
    rows = []
    for name in names:
        arguments["decode_config"]["engine_kwargs"] = kwargs | {"kv_events_config": MAPS[name]}
        with serve_shortest_queue_without_pool(arguments, port=port) as client:
            client.set_policy(policy)
            before = client.status()["counters"]
            load = {"in_flight": in_flight, "think_s": think_seconds, "longest": kwargs["max_model_len"]}
            requests = asyncio.run(converse(client.url, chosen, seed=seed, **load))
            time.sleep(_REPORTS_S)
            rows.append({"map": name, "requests": requests} | make_row(before, client.status()["counters"]))
    inputs = {"policy": policy, "sessions": len(chosen), "in_flight": in_flight, "blocks": blocks}
    inputs |= {"think_s": think_seconds, "deployment": deployment.stem, "trace": trace.name}
    notes = (
        "Two whole replicas. A hit rate is the share of prompt tokens that were cached. The error is that of "
        "the predicted hit rate against the measured one."
    )
    publish("prefix_hits", rows, inputs=inputs, seed=seed, out=out, notes=notes)


if __name__ == "__main__":
    run(prefix_hits)
