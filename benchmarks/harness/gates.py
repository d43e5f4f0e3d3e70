"""The gates' scores of the captured prompts: what a continuous signature is made of (the paper's Figure 7).

Engines report the experts that the gates choose, not their scores. So the prompts go once more through
the model, in transformers' own implementation; it agrees with the engine's choices but for rounding.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from safetensors.numpy import load_file, save

from benchmarks.harness.engines import WEIGHTS, weights_name
from eldr_serve.files import write_whole


def gate_scores(tokens: list[list[int]], work: Path) -> dict[str, NDArray[np.float32]]:
    """float32[N, L, E] by name, sums over each prompt's tokens; kept in the work folder.

    `gate-prob`: of the gate's softmax over all experts; `gate-logit`: of its raw output.
    """
    name = hashlib.sha256(json.dumps([tokens, weights_name()]).encode()).hexdigest()[:10]
    path = work / f"gates_{name}.safetensors"
    if not path.exists():
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()
        found: dict[str, list[torch.Tensor]] = {"gate-prob": [], "gate-logit": []}
        for prompt in track(tokens, description="scores of the gates"):
            with torch.inference_mode():
                out = model(torch.tensor([prompt]), output_router_logits=True, logits_to_keep=1)
            logits = torch.stack(out.router_logits)  # [L, T, E]
            found["gate-prob"].append(logits.softmax(dim=-1).sum(dim=1))
            found["gate-logit"].append(logits.sum(dim=1))
        write_whole(path, save({key: torch.stack(rows).numpy() for key, rows in found.items()}))
    scores: dict[str, NDArray[np.float32]] = load_file(path)
    return scores
