"""Run an engine of one process, or of 2 or 4 ranks with expert parallelism, as a script.

One process writes its answers and counts. Two ranks must give the same answers and counts under every
placement, choice of replicas and migration, also when compiled. Four ranks must, with an initial placement.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.lib import tiny_model

RANKS, REDUNDANT = 2, 8
LAYERS, EXPERTS = tiny_model.LAYERS, tiny_model.EXPERTS
SLOTS = EXPERTS + REDUNDANT
PROMPTS, OUTPUT = 6, 10


def make_engine(model: str, ranks: int, **others: Any) -> Any:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from eldr_serve.engine.vllm.config import engine_kwargs

    shared = {"model": model, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    if ranks > 1:
        others |= {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
    kwargs = engine_kwargs("calibrate", device="cpu", **shared, **others)
    return LLMEngine.from_engine_args(EngineArgs(**kwargs), UsageContext.LLM_CLASS)


class Session:
    """Requests to an engine. A callback can call it between its steps."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sent = engine, 0

    def answers(self, between: Any = lambda: None) -> list[dict[str, Any]]:
        """Return tokens and counts of the prompts, in order. `between` is called after each step."""
        from vllm import SamplingParams

        rng = np.random.default_rng(0)
        params = SamplingParams(
            max_tokens=OUTPUT,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"eldr_calibrate": True}},
        )
        self._sent += 1
        for number in range(PROMPTS):
            prompt = rng.integers(1, 257, int(rng.integers(3, 90))).tolist()
            fields = {"prompt_token_ids": prompt, "cache_salt": str(self._sent)}
            self._engine.add_request(f"{self._sent}-{number}", fields, params)
        answers_by_request = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    number = int(output.request_id.split("-")[1])
                    answers_by_request[number] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "counts": output.kv_transfer_params["eldr_prefill"],
                        "decode": output.kv_transfer_params["eldr_decode"],
                    }
            between()
        return [answers_by_request[number] for number in range(PROMPTS)]

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        answers: list[Any] = self._engine.collective_rpc("eldr_experts", args=(method, *arguments))
        return answers

    def swap(self, rows: Any, ranks: int = RANKS) -> Any:
        """Swap the placement like the client of a running engine."""
        from eldr_serve.engine.vllm.ep.swap import swap_placement
        from eldr_serve.experts.expert_placement import ExpertPlacement

        async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
            answers: list[Any] = self._engine.collective_rpc(method, args=args)
            return answers

        new_placement = ExpertPlacement(
            np.array(rows), ranks, int(np.max(rows)) + 1, model="tiny", method="drawn"
        )
        return asyncio.run(swap_placement(call, new_placement))


@st.composite
def placements(draw: Any) -> np.ndarray:
    """Draw int[L, P] with every expert in some slot."""
    rows = []
    for _ in range(LAYERS):
        more = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=REDUNDANT, max_size=REDUNDANT))
        rows.append(draw(st.permutations([*range(EXPERTS), *more])))
    return np.array(rows)


def by_rank(rows: Any) -> list[list[list[int]]]:
    """Return [L][G], the sorted experts of each rank, in any slot order."""
    return [[sorted(rank) for rank in np.reshape(row, (RANKS, -1)).tolist()] for row in rows]


def main(model: str, expected: Path) -> None:
    from eldr_serve.experts.parallel.replica_choice import RULES

    session = Session(
        make_engine(
            model,
            RANKS,
            additional_config={
                "eldr_experts": {"redundant_experts": REDUNDANT, "fill_redundant": True, "moves_per_slice": 3}
            },
        )
    )
    alone = json.loads(expected.read_text())
    assert session.answers() == alone, "with experts in equal blocks and replicas of the next rank's"
    first = session.ask("status")
    assert np.min(first[0]["placement"]) >= 0
    assert first[0]["replica_bytes"] * EXPERTS == first[0]["weight_bytes"] * REDUNDANT
    check_log(session)

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(rows=placements(), rule=st.sampled_from(RULES))
    def check_placement(rows: np.ndarray, rule: str) -> None:
        session.ask("choose", rule)
        session.swap(rows)
        for status in session.ask("status"):
            assert by_rank(status["placement"]) == by_rank(rows)
        assert session.answers() == alone, f"{rule} on {rows.tolist()}"

    check_placement()

    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(rows=placements(), rule=st.sampled_from(RULES))
    def check_migration(rows: np.ndarray, rule: str) -> None:
        session.ask("choose", rule)
        slices = session.ask("begin", rows.tolist(), RANKS)[0]
        slices_left = [slices]

        def between() -> None:
            if slices_left[-1]:
                slices_left.append(session.ask("move")[0])

        assert session.answers(between) == alone, "while experts moved"
        assert slices_left == list(range(slices, slices - len(slices_left), -1))
        session.ask("stop")
        assert session.answers() == alone, "where the swap ended"

    check_migration()
    check_refusals(session)
    assert session.answers() == alone
    check_death(session)


def started_with(model: str, expected: Path, first: str, *others: str) -> None:
    """Start 4 ranks with a placement, and migrate to others while they serve."""
    from eldr_serve.experts.expert_placement import ExpertPlacement

    alone = json.loads(expected.read_text())
    choices = {"replica_choice": "metro", "prefill_replica_choice": "even"}
    config = {"placement": first, "moves_per_slice": 24} | choices
    session = Session(make_engine(model, 4, additional_config={"eldr_experts": config}))
    check_held(session, ExpertPlacement.load(first))
    assert session.answers() == alone
    for number, file in enumerate(others):
        placement = ExpertPlacement.load(file)
        slices_left = session.ask("begin", placement.physical_to_logical.tolist(), 4)[0]
        assert slices_left > 1, f"{placement.method} moves no experts"

        def between() -> None:
            nonlocal slices_left
            slices_left = session.ask("move")[0]

        assert session.answers(between) == alone, f"on the way to {placement.method}"
        while slices_left:
            between()
        check_held(session, placement)
        session.ask("choose", ("weighted", "local")[number % 2])
        assert session.answers() == alone, placement.method


def check_held(session: Session, placement: Any) -> None:
    """Check that all ranks know the experts that each should hold."""
    from eldr_serve.experts.expert_placement import placement_id

    for status in session.ask("status"):
        assert placement_id(status["placement"], placement.ranks) == placement.id


def check_compiled(model: str, expected: Path) -> None:
    import torch
    from vllm.config import CompilationMode

    torch._dynamo.config.disable = False  # other engines' tests disable it at import
    engine = make_engine(model, RANKS, enforce_eager=False)
    assert engine.vllm_config.compilation_config.mode == CompilationMode.DYNAMO_TRACE_ONCE
    session = Session(engine)
    assert session.answers() == json.loads(expected.read_text())


def check_log(session: Session) -> None:
    """Check that exactly one rank serves every (token, expert) pair."""
    from eldr_serve.engine.vllm.ep.layer import LOG_COLUMNS

    (end, first), (_, second) = session.ask("batches", 0)
    first, second = np.array(first), np.array(second)
    assert first.shape == (end, LAYERS, len(LOG_COLUMNS))
    first_log, second_log = (
        dict(zip(LOG_COLUMNS, np.moveaxis(log, -1, 0), strict=True)) for log in (first, second)
    )
    assert np.array_equal(first_log["tokens"], second_log["tokens"])
    assert np.array_equal(first_log["pairs"] + second_log["pairs"], first_log["tokens"] * tiny_model.TOP_K)
    assert (first_log["pairs_at_home"] + first_log["tokens_from_other_ranks"] <= first_log["pairs"]).all()
    routed = np.sum(session.ask("routed")[0], axis=1)
    assert np.array_equal(routed, tiny_model.TOP_K * first_log["tokens"].sum(axis=0))
    assert (first_log["slots_with_tokens"] <= SLOTS // RANKS).all()


def check_refusals(session: Session) -> None:
    from eldr_serve.engine.vllm.ep.swap import ExpertPlacementError
    from eldr_serve.experts.parallel.replica_choice import RULES

    before = session.ask("status")
    good = [[*range(EXPERTS), *range(REDUNDANT)]] * LAYERS
    for rows, ranks, sentence in (
        (good[1:], RANKS, "2 layers of 24 slots, but the model has 3 of 24"),
        ([[*range(EXPERTS)]] * LAYERS, RANKS, "3 layers of 16 slots, but the model has 3 of 24"),
        ([[*range(EXPERTS - 1), *range(REDUNDANT + 1)]] * LAYERS, RANKS, "expert 15 of layer 0 has no slot"),
        ([[*range(SLOTS)]] * LAYERS, RANKS, "outside 0 to 15"),
        (good, 4, "for 4 ranks, but the engine has 2"),
    ):
        with pytest.raises(ExpertPlacementError, match=sentence):
            session.swap(rows, ranks)
    assert session.ask("status") == before
    backwards = [row[::-1] for row in before[0]["placement"]]
    assert session.ask("begin", backwards, RANKS)[0] > 1
    under_way = session.ask("status")
    with pytest.raises(ExpertPlacementError, match="under way"):
        session.swap(good)
    assert session.ask("status") == under_way
    session.ask("stop")
    assert (
        session.ask("choose", "best")
        == ["unknown replica choice 'best': there are " + ", ".join(sorted(RULES))] * RANKS
    )


def check_death(session: Session) -> None:
    """Check that the engine ends when a rank dies during a slice, and does not continue without it."""
    executor = session._engine.engine_core.engine_core.model_executor
    backwards = [row[::-1] for row in session.ask("status")[0]["placement"]]
    assert session.ask("begin", backwards, RANKS)[0] > 1
    executor.collective_rpc(die_after_sending)
    with pytest.raises(RuntimeError):
        session.answers(lambda: session.ask("move"))
    assert executor.is_failed


def die_after_sending(worker: Any) -> None:
    """End the last rank after it has sent the first of an expert's weights; called on each rank."""
    import os
    import signal

    from eldr_serve.engine.vllm.ep import transfer

    if worker.rank == 0:
        return
    send = transfer.dist.isend

    def last(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    transfer.dist.isend = last


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if sys.argv[2] == "alone":
        Path(sys.argv[3]).write_text(json.dumps(Session(make_engine(sys.argv[1], 1)).answers()))
    elif sys.argv[2] == "compiled":
        check_compiled(sys.argv[1], Path(sys.argv[3]))
    elif sys.argv[2] == "placed":
        started_with(sys.argv[1], Path(sys.argv[3]), *sys.argv[4:])
    else:
        main(sys.argv[1], Path(sys.argv[3]))
