"""Experts and gates of each prompt token of the demo model, which engines do not record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.signature_predictor import tokenizer_fingerprint
from examples.demo_model import WEIGHTS


def is_of_the_demo_model(trace: CalibrationTrace) -> bool:
    """Return whether the demo model's tokenizer made the trace's prompts."""
    from transformers import AutoTokenizer

    return trace.tokenizer == tokenizer_fingerprint(AutoTokenizer.from_pretrained(WEIGHTS).get_vocab())


def token_frequencies(prompts: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.float32]]:
    """Yield float32[n, L*E] for each prompt of n tokens: 1 where the token uses the expert (Hugging Face)."""
    import torch

    for logits, top_k in _router_logits(prompts):
        chosen = torch.zeros_like(logits).scatter_(2, logits.topk(top_k).indices, 1)
        yield chosen.flatten(1).numpy()


def gate_sums(prompts: Sequence[NDArray[Any]]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the sums over a prompt's tokens of the gates' softmax and of their logits, float32[L, E] each."""
    for logits, _ in _router_logits(prompts):
        yield logits.softmax(dim=2).sum(dim=0).numpy(), logits.sum(dim=0).numpy()


def _router_logits(prompts: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, int]]:
    """Yield the logits of each prompt's tokens, float32[n, L, E], and the experts of a token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
    for prompt in prompts:
        with torch.inference_mode():
            output = model(torch.tensor(prompt.astype(np.int64))[None], output_router_logits=True)
        yield torch.stack(output.router_logits, dim=1), model.config.num_experts_per_tok


def token_embeddings() -> NDArray[np.float32]:
    """Return float32[V, hidden]: the demo model's input embeddings."""
    from safetensors.torch import load_file

    weights = load_file(WEIGHTS / "model.safetensors")
    return np.asarray(weights["model.embed_tokens.weight"].float().numpy())
