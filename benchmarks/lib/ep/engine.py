"""One real engine with several expert-parallel ranks, driven step by step.

Tensor-parallel ranks are driven from one process. Data-parallel ranks are a process each, which run the same
function at the same time: they step together, and their experts can move between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.lib.engine_pool import EngineProcesses
from benchmarks.lib.ports import free_port
from benchmarks.lib.replay.engine import ENGINE_ENV
from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError

_AFTER_ALL_STEPS = 1 << 40  # a step number that no log reaches


@dataclass(frozen=True)
class DecodedBatch:
    """The pure decode steps of a batch.

    The migration has `slices`, of which `slices_left` were left when the batch ended.
    """

    answers: Ints  # [requests, tokens]
    seconds: Floats  # [N], wall-clock time of each step on the slowest rank, without moves
    move_s: float  # total time of the migration slices between steps
    experts_moved: int  # experts that these slices moved, in all layers
    received_bytes: int  # bytes of weights that the ranks received from each other
    slices: int
    slices_left: int
    log: Ints  # [G, N, L, 5], work of each rank (`eldr_serve.engine.vllm.ep.layer.LOG_COLUMNS`)
    routed: Ints  # [L, E], tokens of each expert, including prefill
    placement: Ints  # [L, P] at the end; a migration may be incomplete. -1: an empty slot


class EpEngine(EngineProcesses):
    """A context manager of one engine.

    Args:
        model: directory. Tensor-parallel ranks must divide the number of heads.
        ranks: number of ranks of expert parallelism, G.
        data_parallel: whether each rank has requests of its own; otherwise the ranks are tensor-parallel.
        redundant: slots of a layer beyond one per expert.
        moves_per_slice: maximum number of experts that move between two steps.
        max_batch: maximum number of requests of a rank that decode together.
    """

    def __init__(
        self,
        model: Path,
        *,
        ranks: int,
        redundant: int,
        moves_per_slice: int,
        max_batch: int,
        data_parallel: bool = False,
    ) -> None:
        self._num_processes = ranks if data_parallel else 1
        context = get_context("spawn")
        numbers = context.SimpleQueue()
        for part in range(self._num_processes):
            numbers.put(part)
        shared = numbers, context.Barrier(self._num_processes), free_port()
        super().__init__(
            self._num_processes, _start, *shared, str(model), ranks, redundant, moves_per_slice, max_batch
        )

    def place(self, placement: Ints, rule: str, load: Floats) -> None:
        """Apply the placement int[L, P] (-1: an empty slot) and rule, with expected tokens `load` [L, E]."""
        self._call(_place, placement, rule, load)

    def decode(
        self,
        prompts: Sequence[list[int]],
        tokens: int,
        *,
        name: str,
        homes: Ints | None = None,
        migrate_to: Ints | None = None,
        load: Floats | None = None,
    ) -> DecodedBatch:
        """Decode `tokens` tokens of each prompt greedily, all prompts at once.

        Args:
            name: name of these prompts, whose KV blocks are in the prefix cache when they are measured.
            homes: int[requests], the data-parallel rank of each prompt; None: equal blocks of the prompts.
            migrate_to: int[L, P], placement to reach, by one slice of moves after each decode step.
            load: float[L, E], expected tokens of each expert under `migrate_to`; None: as before.
        """
        if homes is None:
            homes = np.arange(len(prompts)) * self._num_processes // len(prompts)
        numbers = [np.flatnonzero(homes == part) for part in range(self._num_processes)]
        shares = [[prompts[n] for n in share] for share in numbers]
        name += f" on {homes.tolist()}"
        decoded: list[DecodedBatch] = self._call(_decode, shares, tokens, name, migrate_to, load)
        return replace(
            decoded[0],
            answers=np.concatenate([part.answers for part in decoded])[np.argsort(np.concatenate(numbers))],
            seconds=np.max([part.seconds for part in decoded], axis=0),
            move_s=max(part.move_s for part in decoded),
            received_bytes=sum(part.received_bytes for part in decoded),
            log=np.concatenate([part.log for part in decoded]),
        )

    def _call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the function's result in each process, in the order of ranks."""
        futures = [self._pool.submit(_run, function, *arguments) for _ in range(self._num_processes)]
        return [result for _, result in sorted((future.result() for future in futures), key=itemgetter(0))]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:  # stop tensor-parallel ranks before their parent process
                self._call(_stop)
        finally:
            super().__exit__(kind, error, trace)


_engine: Any
_ranks: int
_data_rank: int  # the data-parallel rank of this process
_barrier: Barrier
_num_requests = 0
_cached_names: set[str] = set()  # names of prompts in the prefix cache


def _start(
    numbers: SimpleQueue[int],
    barrier: Barrier,
    port: int,
    model: str,
    ranks: int,
    redundant: int,
    moves_per_slice: int,
    max_batch: int,
) -> None:
    global _engine, _ranks, _data_rank, _barrier
    from eldr_serve.engine.vllm.ep.plugin import EXPERT_PARALLEL_ENV, register

    _ranks, _data_rank, _barrier = ranks, numbers.get(), barrier
    os.environ |= ENGINE_ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", EXPERT_PARALLEL_ENV: "1"}
    os.environ |= {
        "VLLM_DP_SIZE": str(barrier.parties),
        "VLLM_DP_RANK": str(_data_rank),
        "VLLM_DP_RANK_LOCAL": str(_data_rank),
        "VLLM_DP_MASTER_PORT": str(port),
    }
    register()  # the plug-in does this in every process if the package is installed
    from vllm import EngineArgs, LLMEngine

    _engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            max_model_len=1024,
            max_num_seqs=max_batch,
            max_num_batched_tokens=4096,
            seed=0,
            dtype="float32",
            block_size=32,
            enable_prefix_caching=True,
            enforce_eager=True,
            async_scheduling=False,
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks // barrier.parties,
            distributed_executor_backend="mp" if barrier.parties == 1 else "uni",
            enable_expert_parallel=True,
            worker_extension_cls="benchmarks.lib.ep.stepped_worker.SteppedWorker",
            additional_config={
                "eldr_experts": {"redundant_experts": redundant, "moves_per_slice": moves_per_slice}
            },
        )
    )


def _run(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """Return this process's rank, and the function's result, once each process has received a call."""
    _barrier.wait()
    return _data_rank, function(*arguments)


def _stop() -> None:
    _engine.engine_core.shutdown()


def _ask(method: str, *arguments: Any) -> list[Any]:
    answers: list[Any] = _engine.collective_rpc("eldr_experts", args=(method, *arguments))
    for answer in answers:
        if isinstance(answer, str):
            raise UserInputError(answer)
    return answers


def _next_step_number() -> int:
    """Return the number that the layers' logs will give the next step."""
    number, _ = _ask("batches", _AFTER_ALL_STEPS)[0]
    return int(number)


def _place(placement: Ints, rule: str, load: Floats) -> None:
    _ask("choose", rule)
    slices_left = _ask("begin", placement.tolist(), _ranks, load.tolist())[0]
    while slices_left:
        slices_left = _ask("move")[0]


def _decode(
    shares: Sequence[Sequence[list[int]]],
    tokens: int,
    name: str,
    migrate_to: Ints | None,
    load: Floats | None,
) -> DecodedBatch:
    global _num_requests
    from vllm import SamplingParams

    if name not in _cached_names:
        _cached_names.add(name)
        _decode(shares, 2, name, None, None)
    prompts = shares[_data_rank]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    first = _num_requests + 1
    for prompt in prompts:
        _num_requests += 1
        _engine.add_request(str(_num_requests), {"prompt_token_ids": prompt, "cache_salt": name}, params)
    first_step = _next_step_number()
    routed_before, states_before = np.array(_ask("routed")[0]), _ask("status")
    seconds, decoding = [], 0
    move_s = 0.0
    slices = slices_left = 0
    if migrate_to is not None:
        slices = slices_left = _ask(
            "begin", migrate_to.tolist(), _ranks, None if load is None else load.tolist()
        )[0]
    answers: dict[int, Sequence[int]] = {}
    while _engine.has_unfinished_requests():
        start = perf_counter()
        outputs = _engine.step()
        seconds.append(perf_counter() - start)
        decoding += len(outputs) == len(prompts)
        answers |= {int(o.request_id) - first: o.outputs[0].token_ids for o in outputs if o.finished}
        if slices_left and decoding:
            start = perf_counter()
            slices_left = _ask("move")[0]
            move_s += perf_counter() - start
    if slices_left:
        _ask("stop")
    log = np.array([rows for _, rows in _ask("batches", first_step)])
    is_decode = log[0, :, 0, 0] == sum(map(len, shares))  # number of tokens of the step
    states = _ask("status")
    routed = np.array(_ask("routed")[0]) - routed_before
    received = (state["bytes_received"] for state in states)
    received_before = (state["bytes_received"] for state in states_before)
    return DecodedBatch(
        np.reshape([answers[number] for number in range(len(prompts))], (-1, tokens)).astype(np.int64),
        np.array(seconds)[is_decode],
        move_s,
        states[0]["experts_moved"] - states_before[0]["experts_moved"],
        sum(received) - sum(received_before),
        slices,
        slices_left,
        log[:, is_decode],
        routed,
        np.array(states[0]["placement"]),
    )
