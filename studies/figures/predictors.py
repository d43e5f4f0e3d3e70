"""DIRECTOR's predictors on the demo model: trained and judged on its own routes (paper, Tables I and II).

Half of the requests train the cascade, the other half measures. Accuracy is over the tokens that really were
there: of the prompt, and of the sampled answer (teacher-forced). What a placement needs is foretold from the
prompt alone, before it runs: the experts of the decode steps, whose tokens nobody knows yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch

from offline.placement.affinity import expert_load
from studies.cascade import Cascade, predict_routes, train_cascade
from studies.figures import shifting
from studies.figures.demo_routes import STEPS, DemoRoutes, demo_model, generated, routes_of
from studies.low_bit_replica import quantise_
from studies.prediction import match_rate, workload_error
from tools.progress import progress_bar
from tools.trace import CalibrationTrace

NUMBER = 48  # prompts a domain
TRAINING_STEPS = 300
CASCADES = (1, 2, 6)  # stages
BITS = (8, 4)
_TOP_K = 4
_BATCH, _BATCHES = 64, 100  # requests of a batch whose workload is foretold

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Predicted:
    """What one predictor says about the requests that measure.

    Attributes:
        routes: [T, L, k] of each request's tokens, prompt and answer.
        size_pct: of the served model, bf16.
        request_ms: to foretell one prompt.
        answers: [STEPS, L, k] of its own greedy answer, where it can write one.
        answer_ms: to write it.
    """

    routes: list[Array]
    size_pct: float
    request_ms: float
    answers: list[Array] | None = None
    answer_ms: float | None = None


def trace_of(observed: DemoRoutes) -> CalibrationTrace:
    """The same requests as a calibration trace: the prompt is the prefill, the answer the decode."""
    layers, top_k = observed.routes[0].shape[1:]
    answers = np.stack([observed.answer(n)[1] for n in range(len(observed.domains))])
    return CalibrationTrace(
        "eldr-demo", top_k, _counts([observed.prompt(n)[1] for n in range(len(answers))]),
        _counts(list(answers)), np.full(len(answers), STEPS, np.uint32),
        observed.prompt_tokens.astype(np.uint32), observed.domains, [str(n) for n in range(len(answers))],
        answers.reshape(-1, layers, top_k), np.arange(len(answers) + 1) * STEPS,
    )  # fmt: skip


@lru_cache(maxsize=1)
def predicted(observed: DemoRoutes, seed: int) -> dict[str, Predicted]:
    """Every predictor on the measuring half, in the order of `observed.halves`; trains the cascades."""
    train, measure = observed.halves(seed)
    served = demo_model()
    whole = sum(p.numel() for p in served.parameters())
    found: dict[str, Predicted] = {}
    for stages in CASCADES:
        model = _trained(observed, train, stages, served.model.embed_tokens.weight, seed)
        routes, times = [], []
        for n in measure:
            routes.append(predict_routes(model, torch.from_numpy(observed.tokens[n]), _TOP_K).numpy())
            prompt = torch.from_numpy(observed.prompt(n)[0])
            times.append(_seconds(predict_routes, model, prompt, _TOP_K))
        name = "one transformer" if stages == 1 else f"cascade of {stages}"
        found[name] = Predicted(routes, 100 * model.num_parameters / whole, 1e3 * float(np.median(times)))
    prompts = [observed.prompt(n)[0] for n in measure]
    for bits in BITS:
        replica = demo_model()
        size = quantise_(replica, bits)
        routes = routes_of(replica, [observed.tokens[n] for n in measure])
        times = [_seconds(replica, torch.from_numpy(prompt)[None]) for prompt in prompts[:50]]
        begun = perf_counter()
        own = generated(replica, prompts, temperature=None, seed=seed)
        answer_ms = 1e3 * (perf_counter() - begun) / len(prompts)
        texts = [np.concatenate(pair) for pair in zip(prompts, own, strict=True)]
        answers = [routes[-STEPS:] for routes in routes_of(replica, texts)]
        request_ms = 1e3 * float(np.median(times))
        found[f"replica of {bits} bits"] = Predicted(routes, 100 * size, request_ms, answers, answer_ms)
    return found


def forecasts(observed: DemoRoutes, seed: int) -> dict[str, tuple[Array, Array]]:
    """(counts[N, L, E], tokens[N]) that stand for each request's decode; zero for the training half."""
    train, measure = observed.halves(seed)
    trace = trace_of(observed)
    mean = trace.decode_counts[train].mean(axis=0)
    found: dict[str, tuple[Array, Array]] = {
        "mean of the past": (np.tile(mean, (len(trace.ids), 1, 1)), trace.decode_steps)
    }
    for name, guess in predicted(observed, seed).items():
        lengths = observed.prompt_tokens[measure]
        prompts = [routes[:n] for routes, n in zip(guess.routes, lengths, strict=True)]
        found[name] = (_spread(prompts, trace, measure), trace.prompt_tokens)
        if guess.answers is not None:
            found[f"{name}, its own answer"] = (_spread(guess.answers, trace, measure), trace.decode_steps)
    found["prefill signature"] = (trace.prefill_counts, trace.prompt_tokens)
    correction = shifting.correction(trace, train)
    for name, (counts, tokens) in list(found.items()):
        if tokens is trace.prompt_tokens:
            found[f"{name}, corrected"] = (counts * correction, tokens)
    return found


def accuracy(observed: DemoRoutes, seed: int) -> dict[str, dict[str, float | None]]:
    """Of each predictor: match rate over tokens, size, time."""
    _, measure = observed.halves(seed)
    found: dict[str, dict[str, float | None]] = {}
    for name, guess in predicted(observed, seed).items():
        pairs: list[list[tuple[Array, Array]]] = [[], []]
        for n, routes in zip(measure, guess.routes, strict=True):
            length = int(observed.prompt_tokens[n])
            pairs[0].append((routes[:length], observed.prompt(n)[1]))
            pairs[1].append((routes[length:], observed.answer(n)[1]))
        prompt, answer = (
            match_rate(np.concatenate([g for g, _ in p]), np.concatenate([t for _, t in p])) for p in pairs
        )
        found[name] = {
            "prompt_accuracy_pct": 100 * prompt,
            "answer_accuracy_pct": 100 * answer,
            "size_pct": guess.size_pct,
            "request_ms": guess.request_ms,
            "answer_ms": guess.answer_ms,
        }
    return found


def workload_errors(observed: DemoRoutes, seed: int) -> dict[str, float]:
    """Share of a batch's decode tokens that each forecast gives to the wrong expert, %."""
    _, measure = observed.halves(seed)
    trace = trace_of(observed)
    rng = np.random.default_rng(seed)
    domains = np.array(trace.domains)[measure]
    names = np.unique(domains)
    found: dict[str, list[float]] = {}
    known = forecasts(observed, seed)
    for _ in range(_BATCHES):
        mix = rng.dirichlet(np.full(len(names), 0.3))
        chosen = np.array([rng.choice(measure[domains == d]) for d in rng.choice(names, _BATCH, p=mix)])
        truth = trace.decode_counts[chosen].sum(axis=0)
        for name, (counts, tokens) in known.items():
            guess = (counts[chosen] / tokens[chosen][:, None, None]).sum(axis=0)
            found.setdefault(name, []).append(workload_error(guess, truth))
    return {name: 100 * float(np.mean(errors)) for name, errors in found.items()}


def _trained(observed: DemoRoutes, train: Array, stages: int, embedding: torch.Tensor, seed: int) -> Cascade:
    torch.manual_seed(seed)
    layers = observed.routes[0].shape[1]
    model = Cascade(embedding, layers, 64, stages=stages)
    with progress_bar() as progress:
        bar = progress.add_task(f"training {stages} stage(s)", total=TRAINING_STEPS)
        train_cascade(
            model, [torch.from_numpy(observed.tokens[n]) for n in train],
            [torch.from_numpy(observed.routes[n]) for n in train], steps=TRAINING_STEPS, batch=8,
            seed=seed,
            report=lambda *_: progress.update(bar, advance=1),
        )  # fmt: skip
    return model


def _counts(routes: list[Array], experts: int = 64) -> Array:
    """uint32[N, L, E]."""
    return np.stack([expert_load(r, experts) for r in routes]).astype(np.uint32)


def _spread(routes: list[Array], trace: CalibrationTrace, at: Array) -> Array:
    counts = np.zeros_like(trace.prefill_counts)
    counts[at] = _counts(routes)
    return counts


@torch.no_grad()
def _seconds(call: Callable[..., object], *arguments: object) -> float:
    begun = perf_counter()
    call(*arguments)
    return perf_counter() - begun
