"""Build the training corpus and the tokenizer of the demonstration model.

Output directory: `tokenizer/` (Hugging Face), `<domain>.train.npz` and `<domain>.held.npz` with `tokens`
uint16 [T] and `starts` int64 [documents], `held.jsonl` (held-out prompts and texts), `manifest.json`.
Training and held-out documents are made from different source documents and dictionary entries.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from examples.demo_model import dialogues, medicine_and_law, sources

END, USER, ASSISTANT, SYSTEM = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "('<|endoftext|>' if message['role'] == 'assistant' else '\n') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HELD_SHARE = 0.08
PIECE = 1_400  # characters: longer documents are cut, so that training windows begin at many places


def _is_held(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] < 256 * HELD_SHARE


def _pieces(text: str) -> list[str]:
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        if len(piece) + len(line) > PIECE and piece:
            pieces.append(piece)
            piece = ""
        piece += line
    return [p for p in [*pieces, piece] if len(p.strip()) > 40]


def _chat(pair: tuple[str, str]) -> tuple[str, str]:
    return f"{USER}{pair[0].strip()}\n{ASSISTANT}", pair[1].strip()


def _plain(text: str) -> tuple[str, str]:
    return "", text.strip()


Document = tuple[str, str]  # (prompt part, may be empty; answer or text)


class Library:
    """All source texts, read once. `documents` draws one split of one domain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: dict[str, list[sources.Text]] = {domain: [] for domain in sources.DOMAINS}
        readers = (sources.manuals(root), sources.messages(root), sources.licences(root))
        for text in itertools.chain(*readers, sources.standard_library()):
            if text.domain in self.texts:
                self.texts[text.domain].append(text)
        self.terms: dict[str, list[tuple[str, str]]] = {"en": [], "math": [], "medical": [], "legal": []}
        for domain, term, gloss in sources.definitions(root):
            self.terms[domain].append((term, gloss))
        self.codes = sources.diagnoses(root)
        self.diseases = sources.diseases(root)
        self.talk: dict[str, list[tuple[str, str]]] = {domain: [] for domain in sources.DOMAINS}
        for language, question, answer in sources.conversations(root):
            self.talk[language].append((question, answer))

    def documents(self, domain: str, held: bool, rng: random.Random) -> Iterator[Document]:
        """Yield documents of one domain and split, without end, in fixed proportions."""
        streams = self._streams(domain, held, rng)
        weights = [weight for weight, _ in streams]
        while True:
            (_, stream) = rng.choices(streams, weights)[0]
            yield next(stream)

    def _streams(self, domain: str, held: bool, rng: random.Random) -> list[tuple[float, Iterator[Document]]]:
        texts = [t for t in self.texts[domain] if _is_held(t.document) == held]
        pieces = [p for t in texts for p in _pieces(t.text)]
        rng.shuffle(pieces)
        plain = map(_plain, itertools.cycle(pieces))
        if domain == "code":
            words = [t for t, _ in self.terms["en"] if t.isalpha() and t.islower()][::37]
            library = map(_chat, itertools.cycle(dialogues.code_library(rng, texts)))
            return [(0.25, plain), (0.4, library), (0.35, map(_chat, dialogues.code_tasks(rng, words)))]
        if domain in sources.TASKS:
            terms = [t for t in self.terms[domain] if _is_held(t[0]) == held]
            asked = map(_chat, medicine_and_law.glossary(rng, terms))
            joined = ("\n\n".join(f"{t}: {g}" for t, g in rng.sample(terms, 5)) for _ in itertools.count())
            listed_terms = map(_plain, joined)
            if domain == "math":
                return [(0.8, map(_chat, dialogues.maths(rng))), (0.1, asked), (0.1, listed_terms)]
            if domain == "legal":
                paragraphs = [p for t in texts for p in t.text.split("\n\n") if 100 < len(p) < 1000]
                cases = map(_chat, medicine_and_law.legal(rng, paragraphs))
                return [(0.3, plain), (0.4, cases), (0.2, asked), (0.1, listed_terms)]
            codes = [c for c in self.codes if _is_held(c[0]) == held]
            vignettes = map(_chat, medicine_and_law.medical(rng, self.diseases, codes))
            listed = (
                "\n".join(". ".join([c, *n[:3]]) for c, n in rng.sample(codes, 8)) for _ in itertools.count()
            )
            return [(0.4, vignettes), (0.3, asked), (0.2, listed_terms), (0.1, map(_plain, listed))]
        paragraphs = [p for t in texts for p in t.text.split("\n\n") if 40 < len(p) < 700]
        names = dialogues.world(self.root, domain)
        paragraphs += names["words"] if not held else []
        if not paragraphs:
            raise UserInputError(f"no text of the language {domain!r} was found in the source packages")
        asked = map(_chat, dialogues.questions(rng, domain, names, paragraphs))
        following: Iterator[tuple[str, str]] = (
            (a, b) for t in itertools.cycle(texts) for a, b in itertools.pairwise(_pieces(t.text))
        )
        if not any(len(_pieces(t.text)) > 1 for t in texts):
            following = itertools.cycle(
                zip(rng.choices(paragraphs, k=len(paragraphs)), itertools.cycle(paragraphs), strict=False)
            )
        streams: list[tuple[float, Iterator[Document]]] = []
        streams += [(0.4, asked), (0.35, plain if pieces else asked), (0.1, map(_chat, following))]
        talk = [t for t in self.talk[domain] if _is_held(t[0]) == held]
        if len(talk) > 30:
            # a paragraph follows a short answer, so that there is enough text to sample
            long = ((q, f"{a} {rng.choice(paragraphs)}") for q, a in itertools.cycle(talk))
            streams.append((0.1, map(_chat, long)))
        if domain == "en":
            terms = [t for t in self.terms["en"] if _is_held(t[0]) == held]
            streams.append((0.25, map(_chat, medicine_and_law.glossary(rng, terms))))
        return streams


def take(documents: Iterator[Document], size: int) -> list[Document]:
    """Take documents until `size` UTF-8 bytes are reached."""
    taken, total = [], 0
    while total < size:
        document = next(documents)
        taken.append(document)
        total += sum(len(part.encode()) for part in document)
    return taken


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE of `vocabulary` entries, with the chat marks as special tokens. Id 0 is END."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens uint16 [T], starts int64 [documents]). Every document ends with the end mark."""
    ids = tokenizer([p + t + END for p, t in documents], add_special_tokens=False)["input_ids"]
    starts = np.cumsum([0, *(len(i) for i in ids[:-1])])
    return np.concatenate([np.array(i, np.uint16) for i in ids]), starts


def build(out: Path, packages: Path, megabytes: float, vocabulary: int, seed: int) -> dict[str, object]:
    """Write the corpus to `out`, and return the manifest."""
    library = Library(sources.fetch(packages))
    out.mkdir(parents=True, exist_ok=True)
    splits: dict[tuple[str, bool], list[Document]] = {}
    for domain in sources.DOMAINS:
        share = 0.25 if domain in sources.RARE_LANGUAGES else 1.0
        for held in (False, True):
            rng = random.Random(f"{seed}:{domain}:{held}")
            size = int(1e6 * share * (0.15 if held else megabytes))
            splits[domain, held] = take(library.documents(domain, held, rng), size)
            if not held:
                rng.shuffle(splits[domain, held])
    sample = (p + t for (_, held), docs in splits.items() if not held for p, t in docs[: len(docs) // 3])
    tokenizer = train_tokenizer(sample, vocabulary)
    tokenizer.save_pretrained(out / "tokenizer")
    counts: dict[str, dict[str, int]] = {}
    with (out / "held.jsonl").open("w", encoding="utf-8") as file:
        for (domain, held), documents in splits.items():
            tokens, starts = encode(tokenizer, documents)
            np.savez(out / f"{domain}.{'held' if held else 'train'}.npz", tokens=tokens, starts=starts)
            size = sum(len((p + t).encode()) for p, t in documents)
            split = {"documents": len(documents), "bytes": size, "tokens": len(tokens)}
            counts[f"{domain}.{'held' if held else 'train'}"] = split
            for prompt, text in documents if held else ():
                row = {"domain": domain, "prompt": prompt, "text": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    archives = sorted(p.name for kind in ("debian", "python") for p in (packages / kind).iterdir())
    manifest: dict[str, object] = {"seed": seed, "vocabulary": vocabulary, "megabytes": megabytes}
    manifest |= {"packages": archives, "splits": counts}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def corpus(
    out: Annotated[Path, typer.Option(help="Directory to write the corpus and the tokenizer to.")],
    packages: Annotated[Path, typer.Option(help="Directory for downloaded packages.")] = Path("out/packages"),
    megabytes: Annotated[float, typer.Option(help="Training text per main domain, MB.", min=0.1)] = 3.5,
    vocabulary: Annotated[int, typer.Option(help="Tokenizer entries.", min=300, max=65_535)] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
) -> None:
    """Download the source packages, write training and held-out documents, train the tokenizer."""
    manifest = build(out, packages, megabytes, vocabulary, seed)
    print(json.dumps(manifest["splits"], indent=1))


if __name__ == "__main__":
    run(corpus)
