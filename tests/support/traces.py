"""Synthetic calibration traces: requests of a few domains, each with its favourite experts."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_serve.experts.calibration_trace import CalibrationTrace
from offline.route_files import MODELS
from offline.simulation.requests import Experts, expert_bits


def synthetic_trace(
    n: int = 60, num_layers: int = 4, num_experts: int = 16, top_k: int = 2, domains: int = 3, seed: int = 0
) -> CalibrationTrace:
    """Return a trace whose domains favour their own experts, in all layers but layer 0."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(domains, num_layers, num_experts)) * 2
    taste[:, 0] = 0
    domain = np.arange(n) % domains
    prompt, steps = (rng.integers(5, 40, n).astype(np.uint32) for _ in range(2))

    def route(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.zeros((n, num_layers, num_experts), np.uint32)
        routes = []
        for r in range(n):
            scores = taste[domain[r]] + rng.gumbel(size=(tokens[r], num_layers, num_experts))
            chosen = np.argsort(-scores, axis=-1)[..., :top_k]
            routes.append(chosen.astype(np.uint8))
            for step in chosen:
                np.add.at(counts[r], (np.arange(num_layers)[:, None], step), 1)
        return counts, np.concatenate(routes)

    prefill, _ = route(prompt)
    decode, routes = route(steps)
    return CalibrationTrace(
        model="m",
        top_k=top_k,
        prefill_counts=prefill,
        decode_counts=decode,
        decode_steps=steps,
        prompt_tokens=prompt,
        domains=[f"d{d}" for d in domain],
        ids=[str(r) for r in range(n)],
        routes=routes,
        route_offsets=np.concatenate([[0], np.cumsum(steps, dtype=np.int64)]),
        **_tokens(domain, prompt, seed),
    )


def _tokens(domain: np.ndarray, lengths: np.ndarray, seed: int) -> dict[str, Any]:
    """Draw prompts from ten token ids of the domain and ten that all domains share."""
    rng = np.random.default_rng([seed, 1])
    owner = np.repeat(domain, lengths)
    shared = rng.uniform(size=len(owner)) < 0.5
    ids = np.where(shared, 0, 10 * (1 + owner)) + rng.integers(10, size=len(owner))
    vocabulary = 10 * (2 + int(domain.max()))
    return {"token_ids": ids.astype(np.uint32), "tokenizer": "t", "vocabulary": vocabulary}


def favourites_trace(
    domains: Sequence[str], *, each: int, num_layers: int, num_experts: int, steps: int, others: float
) -> CalibrationTrace:
    """Return a trace whose domains have four favourite experts. The rest have the weight `others`, not 1."""
    rng = np.random.default_rng(0)
    names = np.repeat(domains, each)
    weight = np.full((len(names), num_experts), others)
    for n in range(len(names)):
        weight[n, 4 * (n // each) : 4 * (n // each) + 4] = 1
    scores = np.log(weight)[:, None, None] + rng.gumbel(size=(len(names), 2 * steps, num_layers, num_experts))
    routes = np.argsort(-scores, axis=-1)[..., :2].astype(np.uint8)
    prefill, decode = (
        (part[..., None] == np.arange(num_experts)).sum(axis=(1, 3)).astype(np.uint32)
        for part in (routes[:, :steps], routes[:, steps:])
    )
    tokens = np.full(len(names), steps, np.uint32)
    return CalibrationTrace(
        model="tiny",
        top_k=2,
        prefill_counts=prefill,
        decode_counts=decode,
        decode_steps=tokens,
        prompt_tokens=tokens,
        domains=names.tolist(),
        ids=[f"r{n}" for n in range(len(names))],
        routes=routes[:, steps:].reshape(-1, num_layers, 2),
        route_offsets=np.arange(len(names) + 1) * steps,
        **_tokens(np.arange(len(names)) // each, tokens, 0),
    )


def route_records(
    name: str,
    domains: Sequence[str] = ("law", "intent"),
    *,
    each: int = 15,
    tokens: tuple[int, int] = (30, 50),
) -> list[dict[str, Any]]:
    """Return records of random routes for a known model. Each domain uses its own part of the experts."""
    rng, model = np.random.default_rng(0), MODELS[name]
    part = model.experts // len(domains)
    records = []
    for n in range(each * len(domains)):
        number = int(rng.integers(*tokens))
        chosen = rng.random((number * model.layers, part)).argsort(axis=1)[:, : model.top_k]
        ids = (chosen + part * (n % len(domains))).ravel().tolist()
        letters = "".join(model.alphabet[expert] for expert in ids)
        domain = domains[n % len(domains)]
        records.append({"id": f"r{n}", "domain": domain, model.tokens_field: number, "routes": letters})
    return records


def route_file(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(record)}\n" for record in records).encode()))
    return path


def random_routes(
    rng: np.random.Generator, n: int, steps: tuple[int, int], *, layers: int, experts: int, top_k: int
) -> list[np.ndarray]:
    """Draw the routes [steps, layers, top_k] of n requests. The number of steps is in range(*steps)."""
    return [
        np.stack([[rng.choice(experts, top_k, replace=False) for _ in range(layers)] for _ in range(many)])
        for many in (rng.integers(*steps) for _ in range(n))
    ]


def observed_experts(
    counts: np.ndarray, prompt: np.ndarray, routes: list[np.ndarray], domains: list[str]
) -> Experts:
    """Return the simulator's input from counts [n, L, E] and tokens of prompts, decode routes and domains."""
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in routes])])
    bits = np.concatenate([expert_bits(r, counts.shape[2]) for r in routes])
    return Experts(counts, prompt, bits, offsets, domains)


def save_trace(trace: CalibrationTrace, folders: pytest.TempPathFactory) -> Path:
    path = folders.mktemp("trace") / "trace.safetensors"
    trace.save(path)
    return path
