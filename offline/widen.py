"""Widen a model's experts, or add attention heads, without changing its function.

A new neuron has zero gate, up and down weights, so it adds silu(0) * 0 = 0 to its expert's output. A new head
has a zero query and a zero output projection, so whatever it attends to is multiplied by 0. The widened model
gives the same logits and the same expert choices. But each expert is as large in memory as a real one, so
that a decode step pays a realistic price for each expert that its batch selects. The number of heads can be
a multiple of the number of tensor-parallel ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eldr_serve.commands.run import run
from eldr_serve.data_root import ROOT
from eldr_serve.errors import UserInputError

_WEIGHTS = ROOT / "examples/demo_model/weights"
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")


def widen(model: Path, intermediate: int, out: Path, heads: int | None = None) -> None:
    """Write a copy of `model` with wider experts to `out`, atomically.

    Args:
        intermediate: number of neurons of an expert.
        heads: number of attention heads; None: unchanged.

    Raises:
        UserInputError: `model` is not a Qwen3-MoE directory; `intermediate` is less than the model's, or not
            a multiple of 32 (vLLM's CPU kernel needs whole blocks of 32); `heads` is less than the model's,
            or not a multiple of the key-value heads; or `out` exists.
    """
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
        current_size = config["moe_intermediate_size"]
        current_heads, head_size = config["num_attention_heads"], config["head_dim"]
        kv_heads = config["num_key_value_heads"]
        with safe_open(model / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise UserInputError(
            f"{model} is not a mixture-of-experts model in one safetensors file: {error}"
        ) from error
    if intermediate < current_size or intermediate % 32:
        raise UserInputError(
            f"--intermediate must be a multiple of 32 and at least {current_size}, got {intermediate}"
        )
    heads = current_heads if heads is None else heads
    if heads < current_heads or heads % kv_heads:
        raise UserInputError(
            f"--heads must be a multiple of {kv_heads} and at least {current_heads}, got {heads}"
        )
    if out.exists():
        raise UserInputError(f"{out} exists already")
    for name, tensor in tensors.items():
        match = _EXPERT.search(name)
        if match:
            axis = 1 if match.group(1) == "down" else 0  # down [H, I]; gate, up [I, H]
            shape = list(tensor.shape)
            shape[axis] = intermediate - current_size
            tensors[name] = torch.cat([tensor, tensor.new_zeros(shape)], axis).contiguous()
        elif name.endswith(".self_attn.q_proj.weight"):  # [heads * head_size, hidden]
            tensors[name] = _add_heads(tensor, kv_heads, head_size, heads)
        elif name.endswith(".self_attn.o_proj.weight"):  # [hidden, heads * head_size]
            tensors[name] = _add_heads(tensor.T, kv_heads, head_size, heads).T.contiguous()
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary, ignore=shutil.ignore_patterns("model.safetensors", "SHA256SUMS"))
    config |= {"moe_intermediate_size": intermediate, "num_attention_heads": heads}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
    os.replace(temporary, out)


def _add_heads(weight: torch.Tensor, kv_heads: int, head_size: int, heads: int) -> torch.Tensor:
    """Return the rows of each head group that shares keys and values, and zeros for its new heads."""
    grouped = weight.reshape(kv_heads, -1, weight.shape[1])
    num_new_rows = heads // kv_heads * head_size - grouped.shape[1]
    new = grouped.new_zeros(kv_heads, num_new_rows, weight.shape[1])
    return torch.cat([grouped, new], 1).reshape(heads * head_size, -1).contiguous()


def widen_experts(
    out: Annotated[Path, typer.Option(help="Directory to write, which must not exist.")],
    intermediate: Annotated[
        int, typer.Option(help="Neurons of an expert; 1,024 make 0.98 MB per expert in bf16.")
    ] = 1024,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads, a multiple of the number of tensor-parallel ranks.")
    ] = None,
    model: Annotated[Path, typer.Option(help="Model directory to widen.")] = _WEIGHTS,
) -> None:
    """Write a copy of the model with wider experts or more heads that computes the same function."""
    widen(model, intermediate, out, heads)
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    run(widen_experts)
