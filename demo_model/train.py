"""Train the demo model: a small Qwen3-MoE whose experts specialise by domain.

    python -m demo_model.train --corpus out/corpus/corpus.jsonl --out out/model --steps 3000

Every step sees each domain equally often, and the load-balancing loss is taken over the whole batch,
so that an expert may specialise in a domain without being punished within one sequence. An interrupted
run goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo_model.corpus import DOMAINS
from demo_model.tokenizer import train_tokenizer
from offline.cli import BadInput, run

SEQUENCE = 256  # tokens
PER_DOMAIN = 2  # sequences of each domain in a step


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """7.1 M parameters: 6 layers of 64 experts, 4 a token; 14.2 MB in bf16."""
    return Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=160,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@dataclass
class Tokens:
    """Token streams of a domain: documents and conversations, for training and held out."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]

    def window(self, rng: np.random.Generator, length: int = SEQUENCE, held_out: bool = False) -> np.ndarray:
        """int64[length+1] from one of the streams, each as likely."""
        streams = self.held_out if held_out else self.train
        stream = streams[int(rng.integers(len(streams)))]
        start = int(rng.integers(len(stream) - length - 1))
        return stream[start : start + length + 1].astype(np.int64)


def tokenize(corpus: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Tokens]:
    """The corpus as token streams, by domain; BadInput if a domain is missing."""
    texts: dict[tuple[str, bool, str], list[str]] = {}
    with corpus.open() as lines:
        for line in lines:
            record = json.loads(line)
            texts.setdefault((record["domain"], record["held_out"], record["kind"]), []).append(as_text(record))
    rng = np.random.default_rng(seed)
    found: dict[str, Tokens] = {}
    for domain in DOMAINS:
        streams: dict[bool, list[np.ndarray]] = {False: [], True: []}
        for held_out in (False, True):
            for kind in ("text", "chat"):
                documents = texts.get((domain, held_out, kind), [])
                if not documents:
                    continue
                rng.shuffle(documents)
                ids = tokenizer(documents, add_special_tokens=False)["input_ids"]
                stream = np.concatenate([np.array(i, np.uint16) for i in ids])
                if len(stream) > 2 * SEQUENCE:
                    streams[held_out].append(stream)
        if not streams[False] or not streams[True]:
            raise BadInput(f"{corpus} has too little text of domain {domain!r}")
        found[domain] = Tokens(streams[False], streams[True])
    return found


def as_text(record: dict[str, Any]) -> str:
    """A record as the model sees it; conversations as the chat template writes them."""
    if record["kind"] == "text":
        return f"{record['text']}<|end|>"
    return f"<|user|>{record['prompt']}<|assistant|>{record['answer']}<|end|>"


class TrainableMoe(nn.Module):
    """Forward pass over the parameters of a Qwen3MoeForCausalLM, with tokens sorted by expert."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        super().__init__()
        self.hf = model
        config = model.config
        self._k = config.num_experts_per_tok
        self._experts = config.num_experts
        self._heads, self._kv_heads, self._dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy (nats/token) and load-balancing loss of int64[B,T] tokens."""
        core = self.hf.model
        x = core.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        cos, sin = core.rotary_emb(x, positions)
        balance = x.new_zeros(())
        for layer in core.layers:
            x = x + self._attention(layer.self_attn, layer.input_layernorm(x), cos, sin)
            mixed, layer_balance = self._moe(layer.mlp, layer.post_attention_layernorm(x))
            x, balance = x + mixed, balance + layer_balance
        logits = self.hf.lm_head(core.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, balance / len(core.layers)

    def _attention(self, attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = attention.q_norm(attention.q_proj(x).view(b, t, self._heads, self._dim)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(x).view(b, t, self._kv_heads, self._dim)).transpose(1, 2)
        v = attention.v_proj(x).view(b, t, self._kv_heads, self._dim).transpose(1, 2)
        q, k = (y * cos[:, None] + _rotate_half(y) * sin[:, None] for y in (q, k))
        # At 256 tokens plain products beat the CPU's flash attention, above all backwards.
        scores = (q @ k.transpose(-1, -2)) * self._dim**-0.5
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
        return attention.o_proj(out.transpose(1, 2).reshape(b, t, -1))

    def _moe(self, mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            probability = F.softmax(flat.float() @ mlp.gate.weight.T, dim=-1)
        weight, chosen = probability.topk(self._k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(chosen, minlength=self._experts)
        # Each new number of rows costs oneDNN a compilation, so experts get multiples of 32 rows;
        # the rows that fill up have weight 0.
        padded = (counts + 31) // 32 * 32
        slot = (padded.cumsum(0) - padded - counts.cumsum(0) + counts)[chosen] + torch.arange(len(chosen))
        sizes = padded.tolist()
        rows = order.new_zeros(sum(sizes)).index_copy(0, slot, order // self._k)
        share_of_row = weight.new_zeros(sum(sizes)).index_copy(0, slot, weight.flatten().index_select(0, order))
        inputs = flat.index_select(0, rows).split(sizes)
        parts = [F.linear(part, w) for part, w in zip(inputs, mlp.experts.gate_up_proj.unbind(), strict=True)]
        gate, up = torch.cat(parts).chunk(2, dim=-1)
        hidden = (F.silu(gate) * up * share_of_row[:, None]).split(sizes)
        parts = [F.linear(part, w) for part, w in zip(hidden, mlp.experts.down_proj.unbind(), strict=True)]
        out = torch.zeros_like(flat).index_add(0, rows, torch.cat(parts).to(flat.dtype))
        share = counts.to(probability.dtype) / order.numel()
        balance = self._experts * (share * probability.mean(0)).sum()
        return out.view_as(x), balance


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz; for matrices [..., rows, columns]."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = _orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def _orthogonal(g: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


def optimizers(model: Qwen3MoeForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings and norms, and a slower AdamW for the gates."""
    matrices, gates, others = [], [], []
    for name, p in model.named_parameters():
        if "mlp.gate." in name:
            gates.append(p)
        elif p.ndim >= 2 and "embed" not in name:
            matrices.append(p)
        else:
            others.append(p)
    adam = [{"params": others, "lr": 0.003}, {"params": gates, "lr": 0.002}]
    return [Muon(matrices, lr=0.012), torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0)]


def schedule(step: int, steps: int) -> tuple[float, float]:
    """Learning-rate factor (warm-up, flat to 40 %, linear to 2 %) and weight of the balancing loss."""
    progress = step / steps
    factor = min(1.0, (step + 1) / 40) * (1.0 if progress < 0.4 else 1 - 0.98 * (progress - 0.4) / 0.6)
    balance = 0.01 + 0.04 * max(0.0, 1 - progress / 0.3)
    return factor, balance


def train(
    corpus: Annotated[Path, typer.Option(help="corpus.jsonl from demo_model.corpus.")],
    out: Annotated[Path, typer.Option(help="Folder for the model (Hugging Face format) and checkpoints.")],
    steps: Annotated[int, typer.Option(min=10, help="Steps of 5,120 tokens; about 0.6 s each on one core.")] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
) -> None:
    """Train from scratch or go on from the last checkpoint, then write the weights in bf16."""
    if not corpus.is_file():
        raise BadInput(f"{corpus} is not there; make it with python -m demo_model.corpus")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(corpus, out, seed)
    tokens = tokenize(corpus, tokenizer, seed)
    model = Qwen3MoeForCausalLM(model_config(tokenizer)).float()
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            nn.init.normal_(p, std=0.02 if "down_proj" not in name and "o_proj" not in name else 0.02 / math.sqrt(12))
    trainable = TrainableMoe(model)
    opts = optimizers(model)
    base = [[g["lr"] for g in o.param_groups] for o in opts]
    checkpoint, first = out / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        for o, s in zip(opts, state["optimizers"], strict=True):
            o.load_state_dict(s)
        typer.echo(f"going on from step {first}")
    log = (out / "train_log.jsonl").open("a")
    began = time.perf_counter()
    with Progress(disable=None) as progress:
        bar = progress.add_task("training", total=steps, completed=first)
        for step in range(first, steps):
            rng = np.random.default_rng((seed, step))
            batch = torch.from_numpy(
                np.stack([tokens[d].window(rng) for d in DOMAINS for _ in range(PER_DOMAIN)])
            )
            factor, balance_weight = schedule(step, steps)
            for o, lrs in zip(opts, base, strict=True):
                for group, lr in zip(o.param_groups, lrs, strict=True):
                    group["lr"] = lr * factor
            with torch.autocast("cpu", torch.bfloat16):
                loss, balance = trainable(batch[:, :-1], batch[:, 1:])
            (loss + balance_weight * balance).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for o in opts:
                o.step()
                o.zero_grad(set_to_none=True)
            progress.update(bar, advance=1, description=f"loss {loss.item():.2f}, balance {balance.item():.2f}")
            if step % 20 == 0:
                speed = (step + 1 - first) * batch[:, 1:].numel() / (time.perf_counter() - began)
                line = {"step": step, "loss": loss.item(), "balance": balance.item(), "tokens_per_s": speed}
                log.write(json.dumps(line) + "\n")
                log.flush()
            if (step + 1) % checkpoint_every == 0 or step + 1 == steps:
                state = {"step": step + 1, "model": model.state_dict(), "optimizers": [o.state_dict() for o in opts]}
                torch.save(state, out / "checkpoint.tmp")
                (out / "checkpoint.tmp").rename(checkpoint)
                save(model, tokenizer, out / "weights")
    typer.echo(f"wrote {out / 'weights'}")


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bf16, with its tokenizer."""
    import copy

    narrow = copy.deepcopy(model).to(torch.bfloat16)
    narrow.generation_config.eos_token_id = tokenizer.eos_token_id
    narrow.generation_config.pad_token_id = tokenizer.pad_token_id
    narrow.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run(train)
