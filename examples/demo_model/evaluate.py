"""Measure the demonstration model: loss, share of continuations in the domain, and predictability of experts.

Two sets of prompts are measured in the same way: held-out documents of the corpus, and prompts of another
origin (`--prompts`, a directory of JSON lines with `domain` and `prompt`) that were not trained on. Routing
is read from the Hugging Face implementation in float32. IDF and the layer mask are fitted to one half of the
requests, and rho is measured on the other half.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.quality import inverse_document_frequency, select_layers, signature_quality
from eldr_serve.experts.signature import SignatureSpec
from examples.demo_model import WEIGHTS, sources
from loadgen.results import write_result
from loadgen.workload import read_prompts

LANGUAGES = sources.MAIN_LANGUAGES
GROUPS = {"task": sources.TASKS, "language": LANGUAGES, "all": sources.TASKS + LANGUAGES}
_NOTES = (
    "same_domain and mixed: distinct experts per layer in one decode step, mean over layers and "
    "1,200 drawn batches; a batch draws requests with replacement and a random step of each."
)


class Recorder:
    """The expert ids [tokens, k] of every layer in each forward pass."""

    def __init__(self, model: Any) -> None:
        self.chosen: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _module, _inputs, out: self.chosen.append(out[2]))

    def take(self, batch: int) -> np.ndarray:
        """Return expert ids uint8 [batch, tokens, L, k] of the last pass."""
        stacked = torch.stack(self.chosen, 1)
        self.chosen.clear()
        return stacked.view(batch, -1, *stacked.shape[1:]).to(torch.uint8).numpy()


def held_prompts(tokenizer: Any, corpus: Path, number: int, length: int) -> list[tuple[str, list[int]]]:
    """Return (domain, token ids): whole chat prompts, and plain texts cut after `length` tokens."""
    prompts_by_domain: dict[str, list[list[int]]] = defaultdict(list)
    with (corpus / "held.jsonl").open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            domain = row["domain"]
            if domain not in GROUPS["all"] or len(prompts_by_domain[domain]) == number:
                continue
            text = row["prompt"] or row["text"]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = ids if row["prompt"] else ids[:length]
            if 8 <= len(ids) <= 512:
                prompts_by_domain[domain].append(ids)
    return [(d, ids) for d, prompts in prompts_by_domain.items() for ids in prompts]


def shared_prompts(tokenizer: Any, directory: Path, number: int) -> list[tuple[str, list[int]]]:
    """Return (domain, token ids) of chat prompts: per domain the first `number` of at most 512 tokens."""
    prompts_by_domain: dict[str, list[list[int]]] = defaultdict(list)
    for prompt in read_prompts([directory]):
        if prompt.domain in GROUPS["all"] and len(prompts_by_domain[prompt.domain]) < number:
            chat = [{"role": "user", "content": prompt.text}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) <= 512:
                prompts_by_domain[prompt.domain].append(ids)
    return [(d, ids) for d, prompts in prompts_by_domain.items() for ids in prompts]


@torch.no_grad()
def generate(
    model: Any,
    recorder: Recorder,
    prompts: list[tuple[str, list[int]]],
    new: int,
    temperature: float,
    seed: int,
) -> tuple[CalibrationTrace, list[list[int]]]:
    """Sample up to `new` tokens for each prompt. Omit requests that end within 8 steps."""
    shape = (model.config.num_hidden_layers, model.config.num_experts)
    draw = torch.Generator().manual_seed(seed)
    rows: list[tuple[str, np.ndarray, int, np.ndarray, list[int]]] = []
    prompts = sorted(prompts, key=lambda p: len(p[1]))
    for start in range(0, len(prompts), 32):
        part = prompts[start : start + 32]
        ids, mask = _left_padded([tokens for _, tokens in part])
        size, longest = ids.shape
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        prefill = recorder.take(size)
        steps: list[np.ndarray] = []
        texts: list[list[int]] = [[] for _ in part]
        alive = np.ones(size, bool)
        lengths = np.zeros(size, int)
        for step in range(new + 1):
            probabilities = (out.logits[:, -1].float() / temperature).softmax(-1)
            token = torch.multinomial(probabilities, 1, generator=draw)
            alive &= token[:, 0].numpy() != model.config.eos_token_id
            if step == new or not alive.any():
                break
            for i in np.flatnonzero(alive):
                texts[i].append(int(token[i]))
            mask = torch.cat([mask, mask.new_ones(size, 1)], 1)
            out = model(
                token,
                attention_mask=mask,
                position_ids=positions[:, -1:] + 1 + step,
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            steps.append(recorder.take(size)[:, 0])
            lengths += alive
        for i, (domain, tokens) in enumerate(part):
            if lengths[i] >= 8:
                routes = np.stack([s[i] for s in steps[: lengths[i]]])
                counts = count(prefill[i, longest - len(tokens) :], shape)
                rows.append((domain, counts, len(tokens), routes, texts[i]))
    return _trace(model, rows), [row[-1] for row in rows]


def _trace(model: Any, rows: list[tuple[str, np.ndarray, int, np.ndarray, list[int]]]) -> CalibrationTrace:
    """Return the trace of (domain, prefill counts, prompt tokens, routes, generated tokens) per request."""
    shape = (model.config.num_hidden_layers, model.config.num_experts)
    domains, prefill, prompt_tokens, routes, _ = zip(*rows, strict=True)
    decode_steps = np.array([len(r) for r in routes], np.uint32)
    return CalibrationTrace(
        model="eldr-demo",
        top_k=model.config.num_experts_per_tok,
        prefill_counts=np.stack(prefill),
        decode_counts=np.stack([count(r, shape) for r in routes]),
        decode_steps=decode_steps,
        prompt_tokens=np.array(prompt_tokens, np.uint32),
        domains=list(domains),
        ids=[str(n) for n in range(len(rows))],
        routes=np.concatenate(routes),
        route_offsets=np.concatenate([[0], np.cumsum(decode_steps, dtype=np.int64)]),
    )


def _left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and their mask, int64 [prompts, longest]."""
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, tokens in enumerate(prompts):
        ids[i, -len(tokens) :] = torch.tensor(tokens)
        mask[i, -len(tokens) :] = 1
    return ids, mask


def count(chosen: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return how often each expert was chosen, uint32 [L, E], from ids [tokens, L, k]."""
    flat = chosen.astype(np.int64) + np.arange(shape[0])[None, :, None] * shape[1]
    return np.bincount(flat.ravel(), minlength=shape[0] * shape[1]).reshape(shape).astype(np.uint32)


def active_experts(
    trace: CalibrationTrace, domains: tuple[str, ...], batch: int, rng: np.random.Generator
) -> dict[str, float]:
    """Return mean distinct experts per step and layer, for batches of one domain and evenly mixed ones."""
    members = {d: [i for i, x in enumerate(trace.domains) if x == d] for d in domains}
    members = {d: m for d, m in members.items() if len(m) >= 8}
    assert trace.routes is not None
    assert trace.route_offsets is not None
    routes, offsets, steps = trace.routes, trace.route_offsets, trace.decode_steps.tolist()

    def active(picked: np.ndarray) -> float:
        chosen = [routes[offsets[i] + rng.integers(steps[i])] for i in picked]  # each [L, k]
        stacked = np.concatenate(chosen, 1)
        return float(np.mean([len(np.unique(layer)) for layer in stacked]))

    def mixture() -> np.ndarray:
        return np.array([rng.choice(members[rng.choice(names)]) for _ in range(batch)])

    names, each = list(members), 1200 // len(members)
    same = np.mean([active(rng.choice(m, batch)) for m in members.values() for _ in range(each)])
    mixed = np.mean([active(mixture()) for _ in range(1200)])
    change = float(100 * (same / mixed - 1))
    return {"same_domain": float(same), "mixed": float(mixed), "change_percent": change}


def quality(requests: CalibrationTrace, seed: int) -> dict[str, float]:
    """Return rho of count and count-idf signatures, fitted to half of the requests, measured on the rest."""
    order = np.random.default_rng(seed).permutation(len(requests.domains))
    fit, test = requests.subset_without_routes(order[::2]), requests.subset_without_routes(order[1::2])
    layers = np.arange(fit.prefill_counts.shape[1])
    mask = select_layers(fit.prefill_counts, fit.decode_probability).best_layers
    decode = test.decode_probability.reshape(len(test.domains), -1)
    figures: dict[str, float] = {}
    idf = inverse_document_frequency(fit.prefill_counts)
    for name, weights in (("count", np.ones_like(idf)), ("count_idf", idf)):
        for which, selection in (("all_layers", layers), ("greedy_mask", mask)):
            signatures = SignatureSpec(weights=weights, layers=selection).encode(test.prefill_counts)
            figures[f"rho_{name}_{which}"] = signature_quality(signatures, decode, seed=seed)
    label = np.array([[d == x for x in sorted(set(test.domains))] for d in test.domains], float)
    figures["rho_domain_label"] = signature_quality(label, decode, seed=seed)
    figures["greedy_mask_layers"] = len(mask)
    return figures


def correlation(requests: CalibrationTrace) -> dict[str, float]:
    """Return Pearson's correlation of prompt and decode activation: pooled, and the mean over experts."""
    number = len(requests.domains)
    prefill = (requests.prefill_counts / requests.prompt_tokens[:, None, None]).reshape(number, -1)
    decode = requests.decode_probability.reshape(number, -1)
    used = (prefill.std(0) > 0) & (decode.std(0) > 0)
    each = [np.corrcoef(prefill[:, j], decode[:, j])[0, 1] for j in np.flatnonzero(used)]
    pooled = float(np.corrcoef(prefill.ravel(), decode.ravel())[0, 1])
    mean = float(np.mean(each))
    return {"prefill_decode_pearson_pooled": pooled, "prefill_decode_pearson_mean_expert": mean}


def shares_in_domain(
    domains: list[str], generated: list[list[int]], corpus: Path, vocabulary: int
) -> dict[str, float]:
    """Return the share of continuations that a unigram Bayes classifier puts into their prompt's domain."""
    names = GROUPS["all"]
    logs = []
    for domain in names:
        with np.load(corpus / f"{domain}.train.npz") as file:
            frequency = np.bincount(file["tokens"], minlength=vocabulary) + 1.0
        logs.append(np.log(frequency / frequency.sum()))
    table = np.stack(logs, 1)  # [vocabulary, domains]
    right: dict[str, list[bool]] = defaultdict(list)
    for domain, tokens in zip(domains, generated, strict=True):
        right[domain].append(names[int(table[tokens].sum(0).argmax())] == domain)
    return {d: float(np.mean(v)) for d, v in right.items()}


@torch.no_grad()
def losses(model: Any, recorder: Recorder, corpus: Path) -> tuple[dict[str, float], np.ndarray]:
    """Return each domain's held-out loss, nats per token, over 24 windows of 256 tokens at documents' starts.

    Also return the tokens that each expert got from the main domains' windows [L, E].
    """
    shape = (model.config.num_hidden_layers, model.config.num_experts)
    loss_by_domain, loads = {}, np.zeros(shape)
    for domain in sources.DOMAINS:
        with np.load(corpus / f"{domain}.held.npz") as file:
            tokens, starts = file["tokens"].astype(np.int64), file["starts"]
        starts = starts[starts + 257 <= len(tokens)]
        starts = starts[np.linspace(0, len(starts) - 1, 24).astype(int)]
        ids = torch.from_numpy(np.stack([tokens[s : s + 257] for s in starts]))
        logits = model(ids[:, :-1]).logits.float()
        routes = recorder.take(len(ids))
        if domain in GROUPS["all"]:
            loads += count(routes.reshape(-1, *routes.shape[2:]), shape)
        loss_by_domain[domain] = float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        )
    return loss_by_domain, loads


def evaluate(
    corpus: Annotated[Path, typer.Option(help="Directory written by corpus.py (held-out documents).")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    prompts: Annotated[Path | None, typer.Option(help="Directory of prompts of another origin.")] = None,
    model: Annotated[Path, typer.Option(help="Model directory.")] = WEIGHTS,
    number: Annotated[int, typer.Option(help="Prompts per domain.", min=16)] = 64,
    prompt_length: Annotated[int, typer.Option(help="Tokens of a plain text used as prompt.", min=8)] = 96,
    new_tokens: Annotated[int, typer.Option(help="Maximum tokens generated per prompt.", min=8)] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0.05)] = 0.8,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampling, halves and batches.")] = 0,
) -> None:
    """Write one JSON of losses, domain shares, correlation, rho and active experts."""
    torch.set_num_threads(threads)
    if not (corpus / "held.jsonl").exists():
        raise UserInputError(f"{corpus} has no corpus; make it with examples.demo_model.corpus")
    tokenizer = AutoTokenizer.from_pretrained(model)
    sets = {"held_out": held_prompts(tokenizer, corpus, number, prompt_length)}
    if prompts is not None:
        sets["other_origin"] = shared_prompts(tokenizer, prompts, number)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    recorder = Recorder(network)
    rows: list[dict[str, Any]] = []
    loss_by_domain, loads = losses(network, recorder, corpus)
    for domain, value in loss_by_domain.items():
        rows.append({"measure": "held_out_loss", "domain": domain, "loss_nats_per_token": round(value, 3)})
    for layer, load in enumerate(loads / loads.mean(1, keepdims=True)):
        row = {"measure": "expert_load", "layer": layer, "heaviest_over_mean": round(load.max(), 2)}
        rows.append(row | {"experts_under_1_percent_of_mean": int((load < 0.01).sum())})
    for name, chosen in sets.items():
        random.Random(seed).shuffle(chosen)
        requests, generated = generate(network, recorder, chosen, new_tokens, temperature, seed)
        shares = shares_in_domain(requests.domains, generated, corpus, network.config.vocab_size)
        for domain, share in shares.items():
            row = {"measure": "continuations_in_domain", "prompts": name, "domain": domain}
            rows.append(row | {"share": round(share, 3), "requests": requests.domains.count(domain)})
        for group, domains in GROUPS.items():
            picked = requests.subset_without_routes(np.flatnonzero([d in domains for d in requests.domains]))
            numbers = correlation(picked) | quality(picked, seed)
            row = {"measure": "signature", "prompts": name, "group": group, "requests": len(picked.domains)}
            rows.append(row | {k: round(v, 3) for k, v in numbers.items()})
            for batch in (16, 32):
                counts = active_experts(requests, domains, batch, np.random.default_rng(seed))
                row = {"measure": "active_experts_per_layer_step", "prompts": name, "group": group}
                rows.append(row | {"batch": batch} | {k: round(v, 2) for k, v in counts.items()})
    inputs = {
        "model_sha256": hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest(),
        "prompts_per_domain": number,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "prompt_files": sorted(p.name for p in prompts.iterdir()) if prompts else [],
    }
    write_result(out, "demo_model", rows, seed=seed, inputs=inputs, notes=_NOTES)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    run(evaluate)
