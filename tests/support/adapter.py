"""A random LoRA adapter of the tiny model, and the model with the adapter's weights merged."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_model import LAYERS

RANK, ALPHA = 4, 8
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}  # [out, in]


def make(folder: Path, weights: dict[str, Any], **config: Any) -> Path:
    """Write an adapter in PEFT's format; `weights` are its tensors by name."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*SHAPES]} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return folder


def random_weights(seed: int) -> dict[str, Any]:
    """Return random tensors of an adapter, large enough to change the model's answers."""
    import torch

    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for name, (rows, columns) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                weights[f"{prefix}.lora_{part}.weight"] = torch.randn(shape, generator=generator) / 4
    return weights


def merge(model: Path, weights: dict[str, Any], folder: Path) -> Path:
    """Write the model with the adapter's weights added to its own."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = str(folder / "model.safetensors")
    merged = load_file(file)
    for name, factor in weights.items():
        if ".lora_B." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_B", "")
            merged[target] += ALPHA / RANK * factor @ weights[name.replace("lora_B", "lora_A")]
    save_file(merged, file, metadata={"format": "pt"})
    return folder
