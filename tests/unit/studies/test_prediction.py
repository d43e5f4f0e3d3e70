"""Forecasts of expert use: their measures by hand, and that the torch predictors learn and round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from studies.cascade import Cascade, predict_routes, train_cascade
from studies.low_bit_replica import quantise_, rounded
from studies.prediction import decode_correction, expected_workload, match_rate, workload_error

VOCABULARY, LAYERS, EXPERTS, TOP_K = 24, 4, 8, 2


def ruled(tokens: torch.Tensor) -> torch.Tensor:
    """Experts [T, L, k] of tokens [T]: early layers by the token, late ones by it and the one before."""
    before = torch.cat([tokens[:1], tokens[:-1]])
    first = torch.stack([tokens % EXPERTS, (tokens + before) % EXPERTS], 1).repeat_interleave(2, 1)
    return torch.stack([first, (first + 3) % EXPERTS], 2)


def test_a_cascade_learns_a_rule_from_routes_and_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = Cascade(torch.randn(VOCABULARY, 16), LAYERS, EXPERTS, stages=2, width=32)
    requests = [torch.randint(VOCABULARY, (20 + n % 5,)) for n in range(70)]
    seen, unseen = requests[:60], requests[60:]

    def accuracy() -> float:
        predicted = [predict_routes(model, tokens, TOP_K) for tokens in unseen]
        assert all(p.shape == (len(t), LAYERS, TOP_K) for p, t in zip(predicted, unseen, strict=True))
        return match_rate(torch.cat(predicted), torch.cat([ruled(tokens) for tokens in unseen]))

    assert accuracy() < 0.45  # chance is 0.25
    train_cascade(model, seen, [ruled(tokens) for tokens in seen], steps=80, batch=8, length=24)
    assert accuracy() > 0.6
    one, other = torch.arange(10)[None], torch.cat([torch.arange(9), torch.tensor([20])])[None]
    with torch.no_grad():
        a, b = model.eval()(one), model(other)
    assert torch.allclose(a[:, :9], b[:, :9], atol=1e-5)
    assert not torch.allclose(a[:, 9], b[:, 9], atol=1e-3)


def test_a_replica_keeps_gates_and_vectors_and_states_its_size() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 70)
    errors = [float((rounded(weight, bits, 32) - weight).abs().max()) for bits in (3, 4, 8)]
    assert errors[0] > errors[1] > errors[2] > 0
    grid = torch.tensor([[-7.0, 3.0, 0.0, 7.0]])
    assert torch.allclose(rounded(grid, 4, 4), grid)
    layers = {"gate": nn.Linear(32, 8, bias=False), "up": nn.Linear(32, 64)}
    model = nn.ModuleDict({"mlp": nn.ModuleDict(layers)})
    before = {name: p.clone() for name, p in model.named_parameters()}
    size = quantise_(model, 4)
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert kept == {"mlp.gate.weight", "mlp.up.bias"}
    full, packed = 32 * 8 + 64, 32 * 64
    assert size == pytest.approx((16 * full + (4 + 16 / 32) * packed) / (16 * (full + packed)))


def test_a_correction_undoes_what_prompts_say_of_every_request() -> None:
    rng = np.random.default_rng(0)
    use = rng.dirichlet(np.ones(6), (40, 2))
    tokens, steps = rng.integers(20, 60, 40), np.full(40, 50)
    bias = np.array([3, 1, 1, 1, 1, 0.3])
    prefill, decode = use * bias * tokens[:, None, None], use * steps[:, None, None]
    correction = decode_correction(prefill[:20], tokens[:20], decode[:20], steps[:20])
    truth = decode[20:].sum(axis=0)
    plain, corrected = (
        workload_error(expected_workload(counts[20:], tokens[20:], 50), truth)
        for counts in (prefill, prefill * correction)
    )
    assert corrected < plain / 2
    rare = decode_correction([[[0, 9]]], [9], [[[0, 9]]], [9])
    assert rare.tolist() == [[1, 1]]  # an expert that nobody used is left alone
