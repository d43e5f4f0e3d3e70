"""Measure the time of a decode step of Qwen3-30B-A3B by batch size and number of active experts.

    python -m benchmarks.engine.step_cost --device cuda

A decode engine with random weights sends the tokens of each step to prescribed experts, a chosen number of
them in each layer. Its steps run in the same CUDA graphs as any other step. The router runs as usual, and
then its choices are replaced by one copy per layer. All requests have about `--context` tokens in the KV
cache.

`forward` is the time of the forward pass that EldrConnector reports, by CUDA events. `step` is the wall time
of the whole step, including sampling and scheduling, which is not asynchronous. Rows of level `fit` are
time = fixed + per request * batch + per expert * active experts, summed over layers. Rows of level `package`
come from aiconfigurator-core 0.12.0 (PyPI; tables that NVIDIA measured with vLLM 0.24). They give an MoE
layer's time by active experts, and the time of whole steps with 1,024 tokens of context and the package's own
routing.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.engine.moe_layer_latency import draw_experts
from benchmarks.lib import options
from benchmarks.lib.engines import check_device
from benchmarks.lib.replay.engine import BLOCK, STEP_TOKENS, ReplayEngine, pad_to_blocks
from benchmarks.lib.synthetic import (
    DUMMY,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    KV_BYTES,
    LAYERS,
    TOP_K,
    VOCABULARY,
    write_config,
)
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling.cost import StepSums
from loadgen.plots import lines
from loadgen.results import publish
from loadgen.statistics import median_ci

BENCHMARKS = {"step_cost": "named"}
_WARM_UP = 3  # steps of a batch
_NOTES = (
    "One decode engine has Qwen3-30B-A3B's shape and made-up weights in bf16. Each layer's experts are "
    "prescribed. The figures of `package` are those of aiconfigurator-core 0.12.0, measured elsewhere."
)
# aiconfigurator-core 0.12.0, Qwen3-30B-A3B, bf16, vLLM 0.24: an MoE layer's time, us, as fixed + per active
# expert (its balanced rows, within 3 %), and a whole decode step by batch, ms, 1,024 tokens of context.
PACKAGE: dict[str, tuple[float, float, dict[int, float]]] = {
    "H100": (26.0, 3.10, {1: 4.68, 2: 5.98, 4: 7.91, 8: 10.49, 16: 12.62, 32: 20.78, 64: 24.18}),
    "H200": (24.0, 2.22, {1: 4.04, 2: 4.87, 4: 6.45, 8: 8.32, 16: 10.27, 32: 15.80, 64: 17.75}),
}


@dataclass(frozen=True)
class TimedStep:
    """One decode step: requests, active experts over all layers, and times in seconds."""

    requests: int
    experts: int
    forward_s: float
    step_s: float


def prescribe_experts(capture_class: Any, table: Any) -> None:
    """Let each layer use the experts of the table, int32[T, k], in place of the router's choices.

    This holds for the whole process, until it is called with another table.
    """
    hook = inspect.unwrap(capture_class.store_choices)  # without the copy of an earlier table

    @functools.wraps(hook)
    def store_prescribed(capture: Any, layer: int, experts: Any) -> None:
        experts.copy_(table[: len(experts)])  # CUDA graphs record this copy with the rest of the hook
        hook(capture, layer, experts)

    capture_class.store_choices = store_prescribed


class PrescribedEngine(ReplayEngine):
    """A decode engine whose tokens go to the experts of a table, int32[step_tokens, k], in every layer."""

    def __init__(self, model: str, *, device: str, step_tokens: int, **arguments: Any) -> None:
        import torch

        from eldr_serve.engine.vllm.capture.on_device import DeviceCapture
        from eldr_serve.engine.vllm.capture.on_host import HostCapture

        expert_of_slot = torch.arange(step_tokens * TOP_K, dtype=torch.int32) % EXPERTS
        self._table = expert_of_slot.reshape(-1, TOP_K).to("cpu" if device == "cpu" else "cuda")
        for capture_class in (DeviceCapture, HostCapture):
            prescribe_experts(capture_class, self._table)
        super().__init__(model, device=device, max_num_batched_tokens=step_tokens, **arguments)

    def start(self, prompts: list[list[int]], tokens: int) -> None:
        """Start decoding `tokens` tokens of each prompt. Run the first steps, which may compute prompts."""
        from vllm import SamplingParams

        self.warm(prompts)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            self._engine.add_request(f"request{number}", {"prompt_token_ids": prompt}, params)

    def run_step(self, routed: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Run a step in which token n uses the experts of row n, int64[T, k]. Return available records."""
        import torch

        full = np.resize(routed, self._table.shape)  # padding repeats the batch's experts
        self._table.copy_(torch.as_tensor(full, dtype=torch.int32))
        _, _, records = self.step()
        return records

    def drain(self) -> None:
        """Finish all requests."""
        while self._engine.has_unfinished_requests():
            self.step()


def prescribed_steps(
    engine: PrescribedEngine,
    prompts: list[list[int]],
    active: list[int],
    rounds: int,
    rng: np.random.Generator,
) -> list[TimedStep]:
    """Run `rounds` steps of each number of active experts per layer, in random order, with all prompts."""
    order = [a for _ in range(rounds) for a in rng.permutation(active).tolist()]
    active_by_step = [active[-1]] * _WARM_UP + order
    engine.start(prompts, len(active_by_step) + 2)
    batch, records = len(prompts), []
    for number in [*active_by_step, active[0]]:  # a step's time is known after the next step
        records += engine.run_step(draw_experts(batch, number, EXPERTS, TOP_K, rng))
    engine.drain()
    records_of_batch = [record for record in records if record["requests"] == batch]
    layers = len(records_of_batch[0]["active_by_layer"])
    first = records_of_batch[0]["step"]
    timed_records = [
        record for record in records_of_batch if _WARM_UP <= record["step"] - first < len(active_by_step)
    ]
    for record in timed_records:
        prescribed, active_by_layer = active_by_step[record["step"] - first], record["active_by_layer"]
        if active_by_layer != [prescribed] * layers:
            raise RuntimeError(
                f"a step should activate {prescribed} experts per layer, but activated {active_by_layer}"
            )
    return [TimedStep(batch, sum(r["active_by_layer"]), r["seconds"], r["took"]) for r in timed_records]


def point_rows(steps: list[TimedStep], layers: int) -> list[dict[str, Any]]:
    """Return one row for each batch and number of active experts: medians with intervals in milliseconds."""
    rows = []
    for batch, experts in sorted({(step.requests, step.experts) for step in steps}):
        point_steps = [step for step in steps if (step.requests, step.experts) == (batch, experts)]
        row: dict[str, Any] = {
            "level": "point",
            "batch_size": batch,
            "active_experts": experts / layers,
            "steps": len(point_steps),
        }
        for name in ("forward", "step"):
            times = [1e3 * getattr(step, f"{name}_s") for step in point_steps]
            row |= zip((f"{name}_p50_ms", f"{name}_low_ms", f"{name}_high_ms"), median_ci(times), strict=True)
        rows.append(row)
    return rows


def fit_rows(steps: list[TimedStep]) -> list[dict[str, Any]]:
    """Return rows with the cost that the router fits to the steps of an engine, without KV tokens.

    A row has no cost if there are too few steps, or if their time does not grow with active experts.
    """
    rows: list[dict[str, Any]] = []
    requests, experts = ([getattr(step, name) for step in steps] for name in ("requests", "experts"))
    for name in ("forward", "step"):
        seconds = np.array([getattr(step, f"{name}_s") for step in steps])
        sums = StepSums.from_steps(requests, np.zeros(len(steps)), experts, seconds)
        rows.append({"level": "fit", "of": name, "steps": len(steps)})
        if (cost := sums.fit()) is None:
            continue
        residuals = seconds - cost.seconds(np.array(requests), 0, np.array(experts))
        rows[-1] |= {"fixed_ms": 1e3 * cost.fixed_s, "per_request_us": 1e6 * cost.per_request_s}
        error_pct = 100 * sums.relative_rms_error(cost)
        rows[-1] |= {"per_expert_us": 1e6 * cost.per_expert_s, "relative_error_pct": error_pct}
        rows[-1]["r2"] = 1 - float(np.mean(residuals**2) / np.var(seconds))
    return rows


def package_rows(batches: list[int]) -> list[dict[str, Any]]:
    """Return the package's figures for an MoE layer and for whole steps of these batches."""
    rows: list[dict[str, Any]] = []
    for card, (fixed_us, per_expert_us, step_ms) in PACKAGE.items():
        layer = {"level": "package", "of": f"{card}, MoE layers", "fixed_ms": LAYERS * fixed_us / 1e3}
        rows.append(layer | {"per_expert_us": per_expert_us})
        rows += [
            {"level": "package", "of": f"{card}, step", "batch_size": batch, "step_p50_ms": step_ms[batch]}
            for batch in batches
            if batch in step_ms
        ]
    return rows


def _points(batches: str, active: str) -> dict[int, list[int]]:
    """Return the possible numbers of active experts by batch size, both ascending.

    Raises:
        UserInputError: no number is possible for a batch size.
    """
    lists = (("--batches", batches), ("--active", active))
    sizes, numbers_of_experts = (sorted(set(options.numbers(*option))) for option in lists)
    points = {b: [a for a in numbers_of_experts if TOP_K <= a <= min(EXPERTS, b * TOP_K)] for b in sizes}
    if impossible := [b for b, possible in points.items() if not possible]:
        max_experts = min(EXPERTS, impossible[0] * TOP_K)
        raise UserInputError(
            f"a batch of {impossible[0]} activates {TOP_K} to {max_experts} experts per layer; "
            f"--active must contain a number from {TOP_K} to {max_experts}"
        )
    return points


def step_cost(
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "8,16,32,64",
    active: Annotated[
        str, typer.Option(help="Active experts of a layer, comma-separated; impossible ones are skipped.")
    ] = "8,16,32,48,64,96,128",
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps for each point.")] = 15,
    context: Annotated[int, typer.Option(min=32, help="Tokens of each request's prompt.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Layers; the model's 48 take 61 GB.")] = LAYERS,
    vocabulary: Annotated[int, typer.Option(min=1024, help="Tokens of the vocabulary.")] = VOCABULARY,
    hidden: Annotated[int, typer.Option(min=32, help="Hidden size.")] = HIDDEN,
    intermediate: Annotated[int, typer.Option(min=32, help="Neurons of an expert.")] = INTERMEDIATE,
    device: options.Device = "cuda",
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time decode steps of batches with prescribed experts. Fit the costs per request and active expert."""
    check_device(device)
    points = _points(batches, active)
    sizes = list(points)
    rng = np.random.default_rng(seed)
    prompts = [pad_to_blocks(rng.integers(1, 1024, context).tolist()) for _ in range(sizes[-1])]
    longest = len(prompts[0]) + max(map(len, points.values())) * rounds + _WARM_UP
    longest = BLOCK * (1 + -(-longest // BLOCK))
    kv_bytes = (sizes[-1] + 1) * longest * layers * KV_BYTES
    kv_cache: dict[str, Any] = {} if device == "cpu" else {"kv_cache_memory_bytes": kv_bytes}
    shape = {"layers": layers, "vocabulary": vocabulary, "hidden": hidden, "intermediate": intermediate}
    steps: list[TimedStep] = []
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), **shape)
        engine = PrescribedEngine(
            folder,
            device=device,
            max_batch=sizes[-1],
            max_model_len=longest,
            batches=sizes,
            step_tokens=min(STEP_TOKENS, sizes[-1] * len(prompts[0])),
            **DUMMY,
            **kv_cache,
        )
        for size, possible in points.items():
            steps += prescribed_steps(engine, prompts[:size], possible, rounds, rng)
    rows = [*point_rows(steps, layers), *fit_rows(steps), *package_rows(sizes)]
    path = publish(
        "step_cost",
        rows,
        seed=seed,
        out=out,
        inputs={
            "device": device,
            **shape,
            "experts": EXPERTS,
            "top_k": TOP_K,
            "context": context,
            "rounds": rounds,
        },
        notes=_NOTES,
    )
    measured = [row for row in rows if row["level"] == "point"]
    lines(measured, "active_experts", ["forward_p50_ms"], path.with_suffix(".png"), by="batch_size")


if __name__ == "__main__":
    run(step_cost)
