"""Write held-out questions of the corpus as a workload: the default load of the demo and the tests.

python -m examples.demo_model.prompts --corpus out/corpus --out examples/demo_model/prompts
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from loadgen.workload import WorkloadPrompt, write_prompts

DOMAINS = ("code", "math", "medical", "legal", "en", "zh", "ru", "fr", "es", "de")
_QUESTION = re.compile(r"<\|user\|>(.*?)\s*<\|assistant\|>", re.DOTALL)


def prompts(
    corpus: Annotated[Path, typer.Option(help="Folder written by examples.demo_model.corpus.")],
    out: Annotated[Path, typer.Option(help="Folder for one JSONL file per domain.")],
    limit: Annotated[int, typer.Option(min=1, help="Maximum questions per domain.")] = 80,
    longest: Annotated[int, typer.Option(min=20, help="Maximum characters of a question.")] = 700,
) -> None:
    """Write questions of a seed that training did not use. Some recur in training by chance (model card)."""
    from transformers import AutoTokenizer

    if not (corpus / "tokenizer").is_dir():
        raise UserInputError(f"{corpus} has no corpus; make it with examples.demo_model.corpus")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    out.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        with np.load(corpus / f"{domain}.held.npz") as file:
            text = tokenizer.decode(file["tokens"])
        assert isinstance(text, str)  # one sequence was given
        texts = dict.fromkeys(q.strip() for q in _QUESTION.findall(text) if 10 < len(q.strip()) <= longest)
        workload = [
            WorkloadPrompt(f"{domain}-{n}", domain, text) for n, text in enumerate(list(texts)[:limit])
        ]
        write_prompts(out / f"{domain}.jsonl", workload)
        typer.echo(f"{domain}: {len(workload)} questions")


if __name__ == "__main__":
    run(prompts)
