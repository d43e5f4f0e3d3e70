"""Measure the online signature predictor: its time, its memory, and the time of a placement with it.

    python -m benchmarks.serving.predict_signature

The shape is Qwen3-30B-A3B's (48 MoE layers, 128 experts, top-8, 151,936 token ids). A row has the time to
predict a signature from token ids, and to learn from the true counts.

A request that is placed before its prefill waits total_p50_us of `predict_decision`, which should be below
300 at 1,000 tokens. Its placement uses `marginal-cost` with a prediction and cached prefixes. `predict`
predicts and packs the counts, `hash` cuts the prompt into blocks and hashes them, and `place` includes the
prefix look-up and book-keeping.
"""

from __future__ import annotations

import os
from itertools import product
from time import perf_counter
from typing import Annotated

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a Ray actor has the same settings

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.synthetic import EXPERTS, LAYERS, TOP_K
from eldr_serve.commands.run import run
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.scheduling import PlacementRequest, make_policy
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.prefixes import prompt_blocks
from eldr_serve.scheduling.types import Lease, LeaseState
from loadgen.results import p50_p99_us, publish, time_calls

BENCHMARKS = {"predict_signature": "default"}
VOCABULARY = 151_936
WORKERS = (4, 16, 64, 256)
RUNNING = 16  # running requests per worker
BLOCK_TOKENS = 16
_PROMPTS = 64  # distinct prompts
_SKEW = 0.3  # exponent of the power law of token ids


def predict_signature(
    calls: Annotated[int, typer.Option(min=100, help="Timed predictions of each kind.")] = 2000,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time predictions and updates for prompts of 100 to 10,000 tokens at ranks 32 and 64."""
    rng = np.random.default_rng(seed)
    rows = []
    for rank, tokens in product((32, 64), (100, 1000, 10_000)):
        online = OnlinePredictor(_random_predictor(rank, rng))
        # Lists, as from engines and tokenizers.
        prompts = (VOCABULARY * rng.power(_SKEW, (_PROMPTS, tokens))).astype(np.int64).tolist()
        counts = [online.predictor.predict(prompt) for prompt in prompts]
        row: dict[str, object] = {"rank": rank, "prompt_tokens": tokens}
        for name, timed in (
            ("predict", lambda call: online.predict(prompts[call % _PROMPTS])),  # noqa: B023
            ("observe", lambda call: online.observe(prompts[call % _PROMPTS], counts[call % _PROMPTS])),  # noqa: B023
        ):
            row |= {f"{name}_{q}": us for q, us in p50_p99_us(time_calls(timed, calls=calls)).items()}
        rows.append(row | {"file_mib": len(online.predictor.to_bytes()) / 2**20})
    publish(
        "predict_signature",
        rows,
        seed=seed,
        out=out,
        inputs={"L": LAYERS, "E": EXPERTS, "top_k": TOP_K, "vocabulary": VOCABULARY, "calls": calls},
        notes="One thread. The predictor is random, and token ids follow a power law.",
    )
    publish(
        "predict_decision",
        [_decisions(workers, tokens, calls, rng) for workers, tokens in product(WORKERS, (1000, 10_000))],
        seed=seed,
        out=None if out is None else out.with_stem("predict_decision"),
        inputs={"L": LAYERS, "E": EXPERTS, "top_k": TOP_K, "vocabulary": VOCABULARY, "calls": calls}
        | {"rank": 64, "requests_a_worker": RUNNING, "block_tokens": BLOCK_TOKENS},
        notes="As predict_signature, in one thread. One worker has half of each prompt in its cache.",
    )


def _decisions(workers: int, tokens: int, calls: int, rng: np.random.Generator) -> dict[str, object]:
    """Return a row with p50 and p99 of a whole placement and of each part, in microseconds."""
    online = OnlinePredictor(_random_predictor(64, rng))
    prompts = (VOCABULARY * rng.power(_SKEW, (_PROMPTS, tokens))).astype(np.uint32)
    policy = make_policy("marginal-cost")
    placer = Placer(policy, on_policy_error=_fail)
    placer.set_workers([f"w{worker}" for worker in range(workers)])
    for number in range(RUNNING * workers):
        ids = prompts[number % _PROMPTS]
        counts = online.predict(ids)
        running_request = PlacementRequest(f"held{number}", tokens, 64, expert_counts=counts, predicted=True)
        lease = Lease(running_request, LeaseState.GRANTED, worker=f"w{number % workers}")
        placer.adopt_lease(lease)
        if number < _PROMPTS:
            blocks = prompt_blocks(ids[: tokens // 2], BLOCK_TOKENS)
            placer.workers.prefixes.record_prompt(lease.worker, blocks)
    warm_up, marks = 50, []
    for call in range(warm_up + calls):
        ids = prompts[call % _PROMPTS]
        start_s = perf_counter()
        counts = online.predict(ids)
        assert counts is not None
        counts = counts.astype(np.float16)  # the form that is sent to the router
        predicted_s = perf_counter()
        blocks = prompt_blocks(ids, BLOCK_TOKENS)
        hashed_s = perf_counter()
        request = PlacementRequest("r", tokens, 64, expert_counts=counts, predicted=True, blocks=blocks)
        placer.submit([Lease(request, LeaseState.SENT)])
        marks.append((start_s, predicted_s, hashed_s, perf_counter()))
        placer.finish("r")
    seconds_of_parts = np.diff(np.array(marks[warm_up:]), axis=1)
    row: dict[str, object] = {"workers": workers, "prompt_tokens": tokens}
    for name, seconds in zip(("predict", "hash", "place"), seconds_of_parts.T, strict=True):
        row |= {f"{name}_{quantile}": us for quantile, us in p50_p99_us(seconds.tolist()).items()}
    return row | {f"total_{q}": us for q, us in p50_p99_us(seconds_of_parts.sum(axis=1).tolist()).items()}


def _fail(error: Exception) -> None:
    raise error


def _random_predictor(rank: int, rng: np.random.Generator) -> SignaturePredictor:
    directions = np.linalg.qr(rng.normal(size=(LAYERS * EXPERTS, rank)))[0].T.reshape(rank, LAYERS, EXPERTS)
    tokens = rng.normal(size=(VOCABULARY, rank)).astype(np.float32) / np.float32(rank)
    return SignaturePredictor(
        model="m",
        tokenizer="t",
        top_k=TOP_K,
        mean=np.full((LAYERS, EXPERTS), TOP_K / EXPERTS, np.float32),
        token_factors=tokens,
        expert_factors=np.ascontiguousarray(directions, np.float32),
        variance=np.ones(VOCABULARY, np.float32),
    )


if __name__ == "__main__":
    run(predict_signature)
