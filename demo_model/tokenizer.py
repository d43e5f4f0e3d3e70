"""The demo model's tokenizer: byte-level BPE over all domains, and a plain chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

VOCABULARY = 4096
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(corpus: Path, out: Path, seed: int, characters: int = 600_000) -> PreTrainedTokenizerFast:
    """Train on a sample of `characters` a domain, or load what `out` already holds."""
    folder = out / "weights"
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    samples: dict[str, list[str]] = {}
    with corpus.open() as lines:
        for line in lines:
            record = json.loads(line)
            samples.setdefault(record["domain"], []).append(
                record["text"] if record["kind"] == "text" else f"{record['prompt']}\n{record['answer']}"
            )
    texts: list[str] = []
    for documents in samples.values():
        random.Random(seed).shuffle(documents)
        size = 0
        for document in documents:
            texts.append(document[:20_000])
            size += len(texts[-1])
            if size > characters:
                break
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
