"""Train the demonstration model: a Qwen3MoeForCausalLM of 7.1 million parameters, on a CPU.

Recipe: batches balanced over domains, Muon for matrices and AdamW for the rest, learning rates with warm-up,
plateau and linear decay, and two loss terms on the router: load balance over the whole mixed batch, strong at
first so that all experts are used, and a term that concentrates each sequence on few experts. Together they
make a sequence more informative about its experts. The model sees no domain label.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from examples.demo_model import WEIGHTS, sources
from examples.demo_model.muon import Muon

# sequences of each domain among 32 drawn; the other languages share the last `RARE`
SEQUENCES = dict(code=4, math=4, medical=4, legal=4, en=2, zh=2, ru=2, fr=2, es=2, de=2, ar=1, ja=1)
RARE = 2
# (tokens of a sequence, sequences of a batch) of each step in a cycle: most prompts are short
SHAPES = ((256, 16), (256, 16), (256, 16), (512, 8))
BLOCK = 32  # rows of an expert are padded to a multiple, since the library compiles for each row count
CHUNK = 128  # queries of a chunk of the attention


def configuration(vocabulary: int) -> Qwen3MoeConfig:
    """Return the committed model's configuration, for a tokenizer with that many entries."""
    config: Qwen3MoeConfig = Qwen3MoeConfig.from_pretrained(WEIGHTS, vocab_size=vocabulary)
    return config


class ToExperts(torch.autograd.Function):
    """A gather of rows of x [T, D] into slots [S, D]. Both directions are gathers: these are fast on CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of: Tensor, slot_of: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of)
        return x[token_of]  # slots without a token repeat token 0 and are never read

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot_of,) = ctx.saved_tensors  # [T, k]
        return grad[slot_of].float().sum(1).to(grad.dtype), None, None


class FromExperts(torch.autograd.Function):
    """The weighted sum [T, D] of each token's slots of y [S, D]."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor, slot_of: Tensor, choice_of: Tensor, used: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y, weights, slot_of, choice_of, used)
        return (y[slot_of].float() * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y, weights, slot_of, choice_of, used = ctx.saved_tensors
        scale = weights.flatten()[choice_of] * used  # a slot without a token has no gradient
        rows = (grad[choice_of // weights.shape[1]] * scale[:, None]).to(y.dtype)
        return rows, (grad[:, None] * y[slot_of].float()).sum(-1), None, None, None


def dispatch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Assign slots to expert ids [T, k], sorted by expert; each expert's slots are padded to whole blocks.

    Returns choice of slot, slot of choice [T, k], used (float, per slot), the slot where each expert ends
    (int32) and each expert's count. The number of slots depends only on the shape, so this can be compiled.
    """
    flat = experts.flatten()
    chosen, order = torch.sort(flat, stable=True)
    ends = torch.searchsorted(chosen, torch.arange(num_experts), right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    last = padded.cumsum(0)
    place = torch.arange(flat.numel()) + (last - padded - ends + counts)[chosen]
    num_slots = flat.numel() + num_experts * BLOCK
    slot = torch.empty_like(flat)
    slot[order] = place
    choice = torch.zeros(num_slots, dtype=torch.long)
    choice[place] = order
    used = torch.zeros(num_slots)
    used[place] = 1
    return choice, slot.view_as(experts), used, last.to(torch.int32), counts


def experts_forward(
    h: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the output of the mixture layer on h [B, T, D] and its two loss terms [2].

    The first term is the balance over the whole batch (E * sum f*p, 1 when even). The second is the mean
    entropy, in nats, of a sequence's average router probabilities: low if the sequence uses few experts.
    """
    x = h.flatten(0, 1)
    probabilities = F.linear(x, gate).softmax(-1)
    weights, chosen = probabilities.topk(4, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    choice_of, slot_of, used, last, counts = dispatch(chosen, gate.shape[0])
    balance = gate.shape[0] * (counts / chosen.numel() * probabilities.mean(0)).sum()
    average = probabilities.view(*h.shape[:2], -1).mean(1)
    entropy = -(average * average.clamp_min(1e-9).log()).sum(-1).mean()
    rows = ToExperts.apply(x.to(dtype), choice_of // chosen.shape[1], slot_of)  # type: ignore[no-untyped-call]
    half, up = F.grouped_mm(rows, gate_up.to(dtype).mT, offs=last).float().chunk(2, -1)
    out = F.grouped_mm((F.silu(half) * up).to(dtype), down.to(dtype).mT, offs=last)
    y = FromExperts.apply(out, weights, slot_of, choice_of, used)  # type: ignore[no-untyped-call]
    return y.view_as(h), torch.stack([balance, entropy])


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Apply root-mean-square normalisation as Qwen3 does."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotary(length: int, dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, dim]."""
    angle = torch.outer(torch.arange(length), theta ** -(torch.arange(0, dim, 2) / dim))
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to queries or keys, [..., length, dim]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def block(
    x: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Apply one layer to x [B, T, D], with residuals, and return x and the router's terms [2]."""
    before, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, after, gate, gate_up, down = weights
    batch, length, _ = x.shape
    h = norm(x, before).to(dtype)
    q, k, v = F.linear(h, torch.cat([q_proj, k_proj, v_proj]).to(dtype)).split([192, 64, 64], -1)
    q = rotate(norm(q.float().view(batch, length, 3, 64), q_norm), cos[:, None], sin[:, None])
    k = rotate(norm(k.float(), k_norm), cos, sin)
    x = x + F.linear(attend(q.to(dtype), k.to(dtype), v), o_proj.to(dtype))
    out, terms = experts_forward(norm(x, after), gate, gate_up, down, dtype)
    return x + out, terms


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of q [B, T, H, 64] to the one head k, v [B, T, 64], and return [B, T, H * 64].

    Queries are processed in chunks, so that nothing beyond a chunk is computed.
    """
    batch, length, heads, dim = q.shape
    parts = []
    for start in range(0, length, CHUNK):
        end = start + CHUNK
        rows = q[:, start:end].flatten(1, 2)
        scores = (rows @ k[:, :end].mT).float().view(batch, CHUNK, heads, end) * dim**-0.5
        late = torch.arange(end) > torch.arange(start, end)[:, None]
        share = scores.masked_fill(late[:, None], -torch.inf).softmax(-1).to(v.dtype)
        parts.append((share.view(batch, CHUNK * heads, end) @ v[:, :end]).view(batch, CHUNK, heads * dim))
    return torch.cat(parts, 1)


def weights_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the weights of `block` as tensors: modules would recompile it for each layer."""
    a, moe = layer.self_attn, layer.mlp
    projections = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.o_proj.weight)
    norms = (a.q_norm.weight, a.k_norm.weight, layer.post_attention_layernorm.weight)
    experts = (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj)
    return (layer.input_layernorm.weight, *projections, *norms, *experts)


def loss_of(model: Qwen3MoeForCausalLM, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cross entropy in nats per token, router's terms [2], means over layers) of int64 [B, T + 1].

    `dtype` is the type of the matrix products, except the router's. All else is in float32.
    """
    body: Any = model.model
    x = body.embed_tokens(tokens[:, :-1])
    cos, sin = rotary(x.shape[1], 64)
    terms = []
    for layer in body.layers:
        x, term = _block(x, cos, sin, weights_of(layer), dtype)
        terms.append(term)
    loss = _head(x, body.norm.weight, body.embed_tokens.weight, tokens[:, 1:], dtype)
    return loss, torch.stack(terms).mean(0)


def head(x: Tensor, weight: Tensor, embedding: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    logits = F.linear(norm(x, weight).to(dtype), embedding.to(dtype))
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


_block = torch.compile(block, dynamic=False)
_head = torch.compile(head, dynamic=False)


@dataclass
class Stream:
    """Windows of one domain's tokens that begin at a document's start."""

    tokens: np.ndarray
    starts: np.ndarray

    def window(self, rng: np.random.Generator, length: int) -> np.ndarray:
        start = min(int(rng.choice(self.starts)), len(self.tokens) - length - 1)
        return self.tokens[start : start + length + 1].astype(np.int64)


def batch(streams: dict[str, Stream], rng: np.random.Generator, length: int, size: int) -> Tensor:
    """Return int64 [size, length + 1], balanced over domains."""
    rare = list(rng.choice(sources.RARE_LANGUAGES, RARE, replace=False))
    domains = [d for d, n in SEQUENCES.items() for _ in range(n)] + rare
    picked = rng.permutation(domains)[:size]
    return torch.from_numpy(np.stack([streams[str(d)].window(rng, length) for d in picked]))


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rates: 40 steps of warm-up, flat to 45 %, linear to 2 %."""
    progress = step / steps
    fall = 1.0 if progress < 0.45 else 1.0 - 0.98 * (progress - 0.45) / 0.55
    return min(1.0, (step + 1) / 40) * fall


def balance_weight(step: int, steps: int, floor: float) -> float:
    """Return the balance loss's weight: from 0.05 to `floor` over the first 30 % of the steps."""
    return max(floor, 0.05 - (0.05 - floor) * step / (0.3 * steps))


def save(model: Qwen3MoeForCausalLM, corpus: Path, out: Path) -> None:
    """Write the model in bfloat16, with its tokenizer, under a temporary name first."""
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(temporary)
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(temporary)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def optimizers_of(model: Qwen3MoeForCausalLM, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Return AdamW for embeddings, norms and gates, Muon for the other matrices, with their peak rates."""
    named = dict(model.named_parameters())
    gates = [p for n, p in named.items() if n.endswith("gate.weight")]
    plain = [p for n, p in named.items() if "embed" in n or p.dim() == 1]
    ids = {id(p) for p in gates + plain}
    groups: list[dict[str, Any]] = [{"params": plain, "lr": 3e-3}, {"params": gates, "lr": 2e-3}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    muon = Muon([p for p in named.values() if id(p) not in ids], lr=6e-3, dtype=dtype)
    for group in (*adam.param_groups, *muon.param_groups):
        group["initial_lr"] = group["lr"]
    return [adam, muon]


@dataclass
class Training:
    """A run with all state that it needs to resume exactly."""

    model: Qwen3MoeForCausalLM
    optimizers: list[torch.optim.Optimizer]
    rng: np.random.Generator
    settings: dict[str, Any]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # nats per token, smoothed

    def write(self, path: Path) -> None:
        """Write the whole state, under a temporary name first."""
        state: dict[str, Any] = {"settings": self.settings, "rng": self.rng.bit_generator.state}
        state |= {name: getattr(self, name) for name in ("step", "tokens", "seconds", "loss")}
        state |= {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        temporary = path.with_name(path.name + ".part")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def read(self, path: Path) -> None:
        """Restore the state in `path`. Raise UserInputError if it is of another run."""
        try:
            state = torch.load(path, weights_only=True)
        except OSError as error:
            raise UserInputError(f"{path} cannot be read, so there is nothing to resume") from error
        if state["settings"] != self.settings:
            raise UserInputError(f"{path} is of a run with {state['settings']}, not {self.settings}")
        self.rng.bit_generator.state = state["rng"]
        for name in ("step", "tokens", "seconds", "loss"):
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def advance(self, streams: dict[str, Stream], dtype: torch.dtype) -> dict[str, float]:
        """Train one step, and return the row to print."""
        began, steps = time.monotonic(), self.settings["steps"]
        length, size = SHAPES[self.step % len(SHAPES)]
        loss, terms = loss_of(self.model, batch(streams, self.rng, length, size), dtype)
        even = balance_weight(self.step, steps, self.settings["balance"])
        pressure = torch.tensor([even, self.settings["focus"]])
        (loss + (pressure * terms).sum()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule(self.step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += length * size
        self.loss = 0.95 * self.loss + 0.05 * loss.item() if self.loss else loss.item()
        self.seconds += time.monotonic() - began
        row = {"step": self.step, "loss_nats": round(self.loss, 4), "balance": round(terms[0].item(), 3)}
        row |= {"sequence_entropy": round(terms[1].item(), 3), "tokens": self.tokens}
        row |= {"seconds": round(self.seconds, 1), "tokens_per_s": round(self.tokens / self.seconds)}
        return row | {"left_s": round(self.seconds / self.step * (steps - self.step))}


def train(
    corpus: Annotated[Path, typer.Option(help="Directory written by examples.demo_model.corpus.")],
    out: Annotated[Path, typer.Option(help="Directory for the trained model (Hugging Face format).")],
    steps: Annotated[int, typer.Option(help="Optimiser steps of 4,096 tokens.", min=1)] = 4_000,
    balance: Annotated[float, typer.Option(help="Final weight of the balance loss.", min=0)] = 0.03,
    focus: Annotated[float, typer.Option(help="Weight of a sequence's router entropy.", min=0)] = 0.03,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and batches.")] = 0,
    every: Annotated[int, typer.Option(help="Steps between writes of OUT and OUT.ckpt.", min=1)] = 100,
    resume: Annotated[bool, typer.Option(help="Resume from OUT.ckpt.")] = False,
    float32: Annotated[bool, typer.Option(help="Compute in float32, for a CPU without bfloat16.")] = False,
) -> None:
    """Train from random weights and write the model, at 6,000 tokens per second on one core."""
    if not (corpus / "manifest.json").exists():
        raise UserInputError(f"{corpus} has no corpus; make it with examples.demo_model.corpus")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    streams = {}
    for domain in sources.DOMAINS:
        with np.load(corpus / f"{domain}.train.npz") as file:
            streams[domain] = Stream(file["tokens"], file["starts"])
    dtype = torch.float32 if float32 else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    model = Qwen3MoeForCausalLM(configuration(len(tokenizer))).float()
    settings = {"steps": steps, "balance": balance, "focus": focus, "seed": seed, "float32": float32}
    training = Training(model, optimizers_of(model, dtype), np.random.default_rng(seed), settings)
    state = out.with_name(out.name + ".ckpt")
    if resume:
        training.read(state)
    while training.step < steps:
        row = training.advance(streams, dtype)
        if training.step % 20 == 0 or training.step == steps:
            print(json.dumps(row), flush=True)
        if training.step % every == 0 or training.step == steps:
            save(model, corpus, out)
            training.write(state)


if __name__ == "__main__":
    run(train)
