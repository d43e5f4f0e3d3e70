"""The demo model run in torch over prompts: the experts of each token, to train and judge predictors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.evaluate import Recorder, checksum, shared_prompts
from demo_model.widen import WEIGHTS
from eldr_serve.files import write_whole
from tools.cli import BadInput
from tools.progress import progress_bar

STEPS = 64  # tokens generated for each prompt
TEMPERATURE = 0.8
_BATCH = 32


@dataclass(frozen=True, eq=False)
class DemoRoutes:
    """N finished requests.

    Attributes:
        domains: N names.
        tokens: N arrays of token ids, prompt and answer.
        prompt_tokens: int[N].
        routes: N arrays uint8[T, L, k], the experts of each of those tokens.
    """

    domains: list[str]
    tokens: list[np.ndarray]
    prompt_tokens: np.ndarray
    routes: list[np.ndarray]

    def halves(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Requests to train on, and to measure with."""
        order = np.random.default_rng(seed).permutation(len(self.domains))
        return order[::2], order[1::2]

    def prompt(self, request: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, routes) of the prompt."""
        length = int(self.prompt_tokens[request])
        return self.tokens[request][:length], self.routes[request][:length]

    def answer(self, request: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, routes) of the answer."""
        length = int(self.prompt_tokens[request])
        return self.tokens[request][length:], self.routes[request][length:]


def demo_model() -> Any:
    """The demo model in float32, ready to run."""
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


@lru_cache(maxsize=1)
def demo_routes(prompts: Path, number: int, seed: int = 0) -> DemoRoutes:
    """Sampled answers to the first `number` prompts a domain; kept in out/ for the next figure.

    Raises:
        BadInput: no folder of prompts.
    """
    if not prompts.is_dir():
        raise BadInput(f"{prompts} is no folder of prompts (*.jsonl.gz)")
    key = [checksum(WEIGHTS / "model.safetensors"), number, seed, STEPS, TEMPERATURE]
    key += [checksum(file) for file in sorted(prompts.glob("*.jsonl.gz"))]
    kept = Path("out") / f"demo_routes_{hashlib.sha256(str(key).encode()).hexdigest()[:10]}.npz"
    if not kept.exists():
        chosen = shared_prompts(AutoTokenizer.from_pretrained(WEIGHTS), prompts, number)
        answers = _answers(demo_model(), chosen, seed)
        _write(kept, [domain for domain, _ in chosen], [len(ids) for _, ids in chosen], answers)
    with np.load(kept) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        return DemoRoutes(
            file["domains"].tolist(), np.split(file["tokens"], ends), file["prompt_tokens"],
            np.split(file["routes"], ends),
        )  # fmt: skip


@torch.no_grad()
def routes_of(model: Any, tokens: list[np.ndarray]) -> list[np.ndarray]:
    """uint8[T, L, k] of each token, the texts given (teacher-forced)."""
    recorder = Recorder(model)
    order = sorted(range(len(tokens)), key=lambda n: len(tokens[n]))
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(order), _BATCH):
        part = order[start : start + _BATCH]
        ids, mask = _padded([tokens[n] for n in part], left=False)
        model(ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
        routes = recorder.take(len(part))
        found |= {n: routes[row, : len(tokens[n])] for row, n in enumerate(part)}
    recorder.remove()
    return [found[n] for n in range(len(tokens))]


@torch.no_grad()
def generated(
    model: Any, prompts: list[np.ndarray], *, temperature: float | None, seed: int
) -> list[np.ndarray]:
    """int[STEPS] answers; sampled at a temperature, or greedy without one."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    found: dict[int, np.ndarray] = {}
    how: dict[str, Any] = (
        {"do_sample": False}
        if temperature is None
        else {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    )
    with progress_bar() as progress:
        bar = progress.add_task("answers of the demo model", total=len(order))
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            ids, mask = _padded([prompts[n] for n in part], left=True)
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, **how
            )
            found |= {n: out[row, -STEPS:].numpy() for row, n in enumerate(part)}
            progress.update(bar, advance=len(part))
    return [found[n] for n in range(len(prompts))]


def _answers(
    model: Any, chosen: list[tuple[str, list[int]]], seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    prompts = [np.array(ids) for _, ids in chosen]
    answers = generated(model, prompts, temperature=TEMPERATURE, seed=seed)
    whole = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    return list(zip(whole, routes_of(model, whole), strict=True))


def _padded(texts: list[np.ndarray], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        span = slice(longest - len(text), longest) if left else slice(0, len(text))
        ids[row, span] = torch.from_numpy(text)
        mask[row, span] = 1
    return ids, mask


def _write(
    path: Path, domains: list[str], prompt_tokens: list[int], answers: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    import io

    content = io.BytesIO()
    np.savez_compressed(
        content, domains=domains, prompt_tokens=prompt_tokens, lengths=[len(t) for t, _ in answers],
        tokens=np.concatenate([t for t, _ in answers]), routes=np.concatenate([r for _, r in answers]),
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
