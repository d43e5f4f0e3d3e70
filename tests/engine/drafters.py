"""Tiny random drafters that use a model's hidden states: an EAGLE head, and an MTP layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.lib.families import FAMILIES


def eagle(folder: Path, hidden: int, vocabulary: int) -> Path:
    """Write a head with one Llama layer, which depends only on the newest token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    layer = LlamaForCausalLM(config).model.layers[0].state_dict()
    weights = {
        f"layers.0.{name}": tensor for name, tensor in layer.items() if name != "input_layernorm.weight"
    }
    # The model repeats a token; with this noise the head predicts it in two of the four texts.
    seen = torch.eye(hidden) + 2 * torch.randn(hidden, hidden) / hidden**0.5
    weights["fc.weight"] = torch.cat([seen, torch.zeros(hidden, hidden)], 1)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def glm_with_mtp(folder: Path) -> Path:
    """Write GLM-4-MoE with an MTP layer, which has experts and depends only on the newest token."""
    family, layers = FAMILIES["GLM-4-MoE"], 3
    replace(family, config=family.config | {"num_hidden_layers": layers + 1}).make(folder)
    saved = folder / "config.json"
    config = json.loads(saved.read_text()) | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    saved.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    mtp, hidden = f"model.layers.{layers}", config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{mtp}.{name}.weight"] = torch.ones(hidden)
    weights[f"{mtp}.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
