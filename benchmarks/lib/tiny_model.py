"""A tiny random Qwen3-MoE with a tokenizer, so that engines need no trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS, EXPERTS, TOP_K = 3, 16, 4


def make(folder: Path, seed: int = 0) -> Path:
    """Write the model to the folder in Hugging Face format, and return the folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=257, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:  # gates are far from ties, so that rounding changes no choice
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(folder)
    return folder
