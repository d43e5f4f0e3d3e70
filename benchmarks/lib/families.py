"""Tiny random checkpoints of MoE families, and the expert choices of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

VOCABULARY = 257
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_ROUTED_16: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
_MLA = _ROUTED_16 | {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",  # the only function of transformers' V3; vLLM reads it from the checkpoint
}
_DEEPSEEK_V2 = _MLA | {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}
_GDN = {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def _engine_arguments(blocks: int, **others: Any) -> dict[str, Any]:
    return {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": blocks} | others


@dataclass(frozen=True)
class Family:
    """A tiny model of one architecture."""

    model: str  # prefix of its classes in transformers
    config: dict[str, Any]  # settings that differ from the common sizes
    config_class: str = ""  # name in transformers, if it does not have the model's prefix
    architecture: str = ""  # name in vLLM, if it differs from the class name in transformers
    exact: bool = True  # vLLM's CPU engine generates the same tokens as the Hugging Face model
    engine: dict[str, Any] = field(
        default_factory=lambda: _engine_arguments(9)
    )  # few KV blocks cause preemptions
    torchvision: bool = False  # vLLM imports torchvision for this model, although only text is used
    mla_for_amx: bool = False  # use vLLM's MLA backend for AMX, which needs AMX, or AVX-512 with bfloat16

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the checkpoint's configuration."""
        return _COMMON | self.config

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Write the checkpoint in Hugging Face format, without a tokenizer."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class or f"{self.model}Config")(**self.settings)
        model = getattr(transformers, f"{self.model}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if _is_gate(name):  # gates are far from ties, so that rounding changes no choice
                torch.nn.init.normal_(parameter, std=1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
        model.save_pretrained(folder)
        if self.architecture:
            saved = folder / "config.json"
            saved.write_text(saved.read_text().replace(type(model).__name__, self.architecture))
        return folder


def _is_gate(name: str) -> bool:
    return (
        name.endswith((".gate.weight", ".router.weight", ".router.proj.weight", ".router.layer.weight"))
        and "shared" not in name
    )


_EXPERTS_16 = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
_LOCAL_8 = {"num_local_experts": 8, "num_experts_per_tok": 2}
# By default vLLM chooses its AMX backend on CPUs with AMX, which does not support float32.
_MLA_ENGINE = _engine_arguments(17, attention_backend="CPU_MLA")
# vLLM's CPU kernel of GDN supports only bfloat16.
_RECURRENT = _engine_arguments(24, dtype="bfloat16", max_model_len=1536)
_SLIDING = ["sliding_attention", "full_attention"] * 2

FAMILIES = {
    "Qwen2-MoE": Family(
        "Qwen2Moe",
        _EXPERTS_16 | {"shared_expert_intermediate_size": 32},
        engine=_engine_arguments(
            6, block_size=288, max_model_len=1440
        ),  # more tokens in a block than a byte can count
    ),
    "Qwen3-MoE": Family("Qwen3Moe", _EXPERTS_16 | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "Mixtral": Family("Mixtral", _LOCAL_8),
    "OLMoE": Family("Olmoe", {"num_experts": 16, "num_experts_per_tok": 4}),
    "Granite-MoE": Family("GraniteMoe", _LOCAL_8),
    "GLM-4-MoE": Family("Glm4Moe", _ROUTED_16 | {"n_group": 4, "topk_group": 2}),
    "Phi-3.5-MoE": Family(
        "Phimoe",
        _LOCAL_8 | {"attention_bias": True, "lm_head_bias": True},  # vLLM assumes both
        architecture="PhiMoEForCausalLM",
    ),
    "Dots1": Family("Dots1", _ROUTED_16 | {"n_shared_experts": 1}),
    "GPT-OSS": Family(
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "layer_types": _SLIDING,
            "sliding_window": 48,
        },
        engine=_engine_arguments(14),
    ),
    "Gemma-4": Family(
        "Gemma4",
        {
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "enable_moe_block": True,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 48,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
        },
        config_class="Gemma4TextConfig",
        engine=_engine_arguments(36),
    ),
    "Llama-4": Family(
        "Llama4",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 32,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        },
        config_class="Llama4TextConfig",
        engine=_engine_arguments(20, max_model_len=160),
    ),
    "Qwen3-Next": Family(
        "Qwen3Next",
        _EXPERTS_16
        | _GDN
        | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "full_attention_interval": 4},
        exact=False,
        engine=_RECURRENT,
    ),
    "LFM2-MoE": Family(
        "Lfm2Moe",
        _EXPERTS_16
        | {
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        # eldr_serve/engine/vllm/compat/moe.py refuses the custom operator, which changes the experts.
        engine=_engine_arguments(24, compilation_config={"custom_ops": ["-rotary_embedding"]}),
    ),
    "Qwen3.5-MoE": Family(
        "Qwen3_5Moe",
        _EXPERTS_16 | _GDN | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 32},
        config_class="Qwen3_5MoeTextConfig",
        exact=False,
        engine=_RECURRENT,
        torchvision=True,
    ),
    "DeepSeek-V2": Family("DeepseekV2", _DEEPSEEK_V2, exact=False, engine=_MLA_ENGINE),
    "DeepSeek-V2 for AMX": Family(
        "DeepseekV2",
        _DEEPSEEK_V2,
        exact=False,
        mla_for_amx=True,
        engine=_engine_arguments(9, dtype="bfloat16", block_size=32),
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3",
        _MLA | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2},
        exact=False,
        engine=_MLA_ENGINE,
    ),
    "Kimi-K2": Family(
        "DeepseekV3",
        _MLA | {"q_lora_rank": 32, "n_group": 1, "topk_group": 1},
        exact=False,
        engine=_MLA_ENGINE,
    ),
    "ERNIE-4.5": Family(
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
}


def choices(folder: Path) -> Callable[[list[int]], NDArray[np.int64]]:
    """Return a function from tokens to int[T,L,k], the experts of Hugging Face's model without a KV cache."""
    reference = Reference(folder)
    return lambda tokens: reference.route(tokens)


class Reference:
    """Hugging Face's model of a checkpoint, in float32 without a KV cache.

    Attributes:
        scores: float[T,L,E], the scores of the routers in the last `route`; empty if routers do not return
            their scores.
        groups: number of groups of experts, and number of groups that a router chooses first; (1, 1) if
            experts have no groups.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._choices: list[torch.Tensor] = []  # choices of each layer
        self._scores: list[torch.Tensor] = []
        self._forced: NDArray[np.int64] | None = None
        self.scores = np.empty(0, np.float32)
        self.groups = (1, 1)
        for module in self._model.modules():
            name = type(module).__name__
            if name == "Llama4Router":
                module.register_forward_hook(self._store_llama_choices)
            elif name.endswith(("TopKRouter", "TopkRouter")):
                module.register_forward_hook(self._store_scores)
            if name.endswith("Experts") and not name.startswith("Llama4"):
                module.register_forward_pre_hook(self._force_experts)

    def _store_llama_choices(self, module: Any, _: Any, output: Any) -> None:
        self._choices.append(output[1].topk(module.top_k).indices)

    def _store_scores(self, module: Any, _: Any, output: Any) -> None:
        bias = getattr(module, "e_score_correction_bias", None)
        self._scores.append(output[0] if bias is None else output[0].sigmoid() + bias)
        if bias is not None:
            self.groups = module.num_group, module.topk_group

    def _force_experts(self, _: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden, ids, weights, *others = arguments
        self._choices.append(ids)
        if self._forced is None:
            return None
        forced = torch.from_numpy(self._forced[:, len(self._choices) - 1]).to(ids)
        # A forced expert gets the weight of the expert that it replaces: they are near a tie.
        is_new = ~(forced[:, :, None] == ids[:, None]).any(-1)
        replaced = ~(ids[:, :, None] == forced[:, None]).any(-1)
        ids = ids.clone()
        ids[replaced] = forced[is_new]
        return hidden, ids, weights, *others

    @torch.no_grad()
    def route(self, tokens: list[int], forced: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return int[T,L,k]: the ids that the routers choose.

        The experts `forced`, int[T,L,k], compute instead of the chosen ones, so that no difference causes
        others.
        """
        self._choices.clear()
        self._scores.clear()
        self._forced = forced
        self._model(torch.tensor([tokens]), use_cache=False)
        if self._scores:
            self.scores = torch.stack([s.reshape(len(tokens), -1) for s in self._scores], 1).numpy()
        return torch.stack([ids.reshape(len(tokens), -1) for ids in self._choices], 1).numpy()
