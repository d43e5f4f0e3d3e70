"""Train the demonstration model: a Qwen3MoeForCausalLM of 7.1 million parameters, on a CPU.

Recipe: batches balanced over domains, Muon for matrices and AdamW for the rest, a warm-up, a plateau and
a linear fall of the learning rates, and a load-balancing loss over the whole mixed batch that is strong
at first and then small, so that experts come alive and may then specialise. No domain label reaches the
model.
"""

from __future__ import annotations

import json
import math
import os
import sys
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

from demo_model import sources

# sequences of each domain among 32 drawn; the languages not named share the last `RARE`
SEQUENCES = dict(code=3, math=3, medical=3, legal=3, en=3, zh=3, ru=2, fr=2, es=2, de=2, ar=1, ja=1)
RARE = 4
# (tokens of a sequence, sequences of a batch) of each step in a cycle: most prompts are short, some are not
SHAPES = ((256, 16), (256, 16), (256, 16), (512, 8))


def configuration(vocabulary: int) -> Qwen3MoeConfig:
    """The model's shapes: 6 layers of 64 experts, 4 a token, 160 wide, experts of 32 neurons."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=160,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        output_router_logits=False,
        router_aux_loss_coef=0.0,
    )


class Scatter(torch.autograd.Function):
    """Rows of x [T, D] into padded expert rows [S, D]; both directions are gathers, which a CPU does fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of: Tensor, slot_of: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of)
        return x.index_select(0, token_of)  # slots without a token repeat token 0 and are never read again

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot_of,) = ctx.saved_tensors  # [T, k]
        rows = grad.index_select(0, slot_of.flatten())
        return rows.view(*slot_of.shape, -1).sum(1), None, None


class Gather(torch.autograd.Function):
    """Expert rows [S, D] back to token order [T, k, D]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token_slot_of: Tensor, slot_of: Tensor, used: Tensor) -> Tensor:
        ctx.save_for_backward(token_slot_of, used)
        return y.index_select(0, slot_of.flatten()).view(*slot_of.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        token_slot_of, used = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, token_slot_of).mul_(used[:, None]), None, None, None


def dispatch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded slots for expert ids [T, k]: token of slot, choice of slot, slot of choice, used."""
    num_tokens, k = experts.shape
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    # a few row counts only: the matrix library compiles a kernel for each new one
    capacity = math.ceil(int(counts.max()) / 64) * 64
    first = torch.cumsum(counts, 0) - counts
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel()) - first[flat[order]]
    slot = flat * capacity + rank
    choice = torch.zeros(num_experts * capacity, dtype=torch.long)
    used = torch.zeros(num_experts * capacity)
    choice[slot] = torch.arange(flat.numel())
    used[slot] = 1
    return choice // k, choice, slot.view(num_tokens, k), used


def experts_forward(moe: nn.Module, x: Tensor, shares: list[Tensor]) -> Tensor:
    """The mixture layer on x [T, D]; appends the balance term (E * sum f*p, 1 when even) to `shares`."""
    probabilities = F.linear(x, moe.gate.weight).softmax(-1)  # type: ignore[union-attr,arg-type]
    weights, chosen = probabilities.topk(4, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    num_experts = probabilities.shape[-1]
    token_of, choice_of, slot_of, used = dispatch(chosen, num_experts)
    f = torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()
    shares.append(num_experts * (f * probabilities.mean(0)).sum())
    rows = Scatter.apply(x, token_of, slot_of).view(num_experts, -1, x.shape[-1])
    gate, up = torch.bmm(rows, moe.experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)  # type: ignore[union-attr,operator]
    out = torch.bmm(F.silu(gate) * up, moe.experts.down_proj.transpose(1, 2))  # type: ignore[union-attr,operator]
    back = Gather.apply(out.flatten(0, 1), choice_of, slot_of, used)  # [T, k, D]
    return (back * weights[..., None]).sum(1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square normalisation as Qwen3 does it."""
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotary(length: int, dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, dim]."""
    angle = torch.outer(torch.arange(length), theta ** -(torch.arange(0, dim, 2) / dim))
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def attention(x: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Attention with its residual on x [B, T, D]; returns x and its normalised form for the experts."""
    before, q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, after = weights
    batch, length, _ = x.shape
    h = norm(x, before)
    q = norm(F.linear(h, q_proj).view(batch, length, -1, 64), q_norm).transpose(1, 2)
    k = norm(F.linear(h, k_proj).view(batch, length, -1, 64), k_norm).transpose(1, 2)
    v = F.linear(h, v_proj).view(batch, length, -1, 64).transpose(1, 2)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    o = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
    x = x + F.linear(o.transpose(1, 2).flatten(2), o_proj)
    return x, norm(x, after)


def attention_weights(layer: Any) -> tuple[Tensor, ...]:
    """The tensors of `attention`: as tensors, for a compiled function is compiled anew for each module."""
    a = layer.self_attn
    projections = (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.o_proj.weight)
    norms = (a.q_norm.weight, a.k_norm.weight, layer.post_attention_layernorm.weight)
    return (layer.input_layernorm.weight, *projections, *norms)


def loss_of(model: Qwen3MoeForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy in nats a token, mean balance term) of tokens int64 [B, T + 1]."""
    body: Any = model.model
    x = body.embed_tokens(tokens[:, :-1])
    cos, sin = rotary(x.shape[1], 64)
    shares: list[Tensor] = []
    for layer in body.layers:
        x, h = _attention(x, cos, sin, attention_weights(layer))
        x = x + experts_forward(layer.mlp, h.flatten(0, 1), shares).view_as(x)
    return _head(x, body.norm.weight, body.embed_tokens.weight, tokens[:, 1:]), torch.stack(shares).mean()


def head(x: Tensor, weight: Tensor, embedding: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(norm(x, weight), embedding)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_attention = torch.compile(attention, dynamic=False)
_head = torch.compile(head, dynamic=False)


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices of update [..., m, n]."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for (batches of) matrices; gate and up halves are separate."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p].setdefault("m", torch.zeros_like(p))
                state.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state, group["momentum"])
                matrices = update.unflatten(-2, (2, -1)) if p.dim() == 3 and p.shape[-2] == 64 else update
                scale = math.sqrt(max(1.0, matrices.shape[-2] / matrices.shape[-1]))
                p.mul_(1 - 0.02 * group["lr"])
                p.add_(orthogonal(matrices).view_as(p), alpha=-group["lr"] * scale * 2.5)


@dataclass
class Stream:
    """Windows of one domain's tokens that begin where a document begins."""

    tokens: np.ndarray
    starts: np.ndarray

    def window(self, rng: np.random.Generator, length: int) -> np.ndarray:
        start = min(int(rng.choice(self.starts)), len(self.tokens) - length - 1)
        return self.tokens[start : start + length + 1].astype(np.int64)


def batch(streams: dict[str, Stream], rng: np.random.Generator, length: int, size: int) -> Tensor:
    """int64 [size, length + 1], balanced over domains."""
    rare = list(rng.choice(sources.RARE_LANGUAGES, RARE, replace=False))
    domains = [d for d, n in SEQUENCES.items() for _ in range(n)] + rare
    picked = rng.permutation(domains)[:size]
    return torch.from_numpy(np.stack([streams[str(d)].window(rng, length) for d in picked]))


def schedule(step: int, steps: int) -> float:
    """Multiplier of the learning rates: 40 steps of warm-up, flat to 45 %, linear to 2 %."""
    progress = step / steps
    fall = 1.0 if progress < 0.45 else 1.0 - 0.98 * (progress - 0.45) / 0.55
    return min(1.0, (step + 1) / 40) * fall


def balance_weight(step: int, steps: int) -> float:
    """0.05 falling to 0.004 over the first 30 % of the steps."""
    return max(0.004, 0.05 - 0.046 * step / (0.3 * steps))


def save(model: Qwen3MoeForCausalLM, corpus: Path, out: Path) -> None:
    """Write the model in bfloat16, with its tokenizer, under a temporary name first."""
    import copy
    import shutil

    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(temporary)
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(temporary)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def main(
    corpus: Annotated[Path, typer.Option(help="directory written by demo_model.corpus")],
    out: Annotated[Path, typer.Option(help="directory for the trained model (Hugging Face format)")],
    steps: Annotated[int, typer.Option(help="optimiser steps, of 4,096 tokens each", min=1)] = 760,
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="seed of initial weights and batches")] = 0,
    every: Annotated[int, typer.Option(help="steps between checkpoints of the weights", min=1)] = 250,
) -> None:
    """Train from random weights and write the model; 1,300 to 3,000 tokens a second on one core."""
    if not (corpus / "manifest.json").exists():
        print(f"demo_model.train: {corpus} holds no corpus; make it with demo_model.corpus", file=sys.stderr)
        raise typer.Exit(2)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    streams = {}
    for domain in sources.DOMAINS:
        with np.load(corpus / f"{domain}.train.npz") as file:
            streams[domain] = Stream(file["tokens"], file["starts"])
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    model = Qwen3MoeForCausalLM(configuration(len(tokenizer))).float()
    named = dict(model.named_parameters())
    gates = [p for n, p in named.items() if n.endswith("gate.weight")]
    plain = [p for n, p in named.items() if "embed" in n or p.dim() == 1]
    matrices = [
        p for n, p in named.items() if not n.endswith("gate.weight") and "embed" not in n and p.dim() > 1
    ]
    adam = torch.optim.AdamW(
        [{"params": plain, "lr": 3e-3}, {"params": gates, "lr": 2e-3}], betas=(0.9, 0.95), weight_decay=0.0
    )
    muon = Muon(matrices, lr=6e-3)
    peak = {id(g): g["lr"] for o in (adam, muon) for g in o.param_groups}
    began, seen, smooth = time.monotonic(), 0, 0.0
    for step in range(steps):
        length, size = SHAPES[step % len(SHAPES)]
        loss, balance = loss_of(model, batch(streams, rng, length, size))
        (loss + balance_weight(step, steps) * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (adam, muon):
            for group in optimizer.param_groups:
                group["lr"] = peak[id(group)] * schedule(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += length * size
        smooth = loss.item() if not smooth else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 0 or step == steps - 1:
            row = {"step": step, "loss_nats": round(smooth, 4), "balance": round(balance.item(), 3)}
            row |= {"tokens": seen, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(row), flush=True)
        if (step + 1) % every == 0 or step == steps - 1:
            save(model, corpus, out)


if __name__ == "__main__":
    typer.run(main)
