"""The comparison of an engine's expert counts with another implementation's, integer by integer.

Reports are those of `benchmarks.lib.exact_engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from benchmarks.lib.exact_engine import Batch
from eldr_serve.engine.routes import unpack_routes
from eldr_serve.experts.signature import unpack_counts

_KINDS = ("signature", "decode", "route", "step")
Choices = Callable[[list[int]], NDArray[np.int64]]


def reference(model: Path) -> Choices:
    """Return a function from tokens to int[T,L,k], the choices of Hugging Face's model in float32."""
    from transformers import Qwen3MoeForCausalLM

    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    top_k = network.config.num_experts_per_tok

    @cache
    @torch.no_grad()
    def route(tokens: tuple[int, ...]) -> NDArray[np.int64]:
        logits = network(torch.tensor([tokens]), output_router_logits=True, use_cache=False).router_logits
        chosen = [layer.reshape(len(tokens), -1).topk(top_k).indices for layer in logits]
        return torch.stack(chosen, 1).numpy()

    return lambda tokens: route(tuple(tokens))


class ComparedCells:
    """Number of compared integers (cells) and number of cells that differ, by each of the kinds."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.compared = dict.fromkeys(kinds, 0)
        self.differ = dict.fromkeys(kinds, 0)

    def add(self, kind: str, counts: ArrayLike, other_counts: ArrayLike) -> None:
        """Compare two arrays. If their shapes differ, all cells count as different."""
        a, b = np.asarray(counts), np.asarray(other_counts)
        differ = int((a != b).sum()) if a.shape == b.shape else max(a.size, b.size, 1)
        self.compared[kind] += b.size
        self.differ[kind] += differ

    def row(self) -> dict[str, int]:
        """Return the columns of a table: `KIND_cells` and `KIND_differ` of each kind."""
        return {
            column: value
            for kind, cells in self.compared.items()
            for column, value in ((f"{kind}_cells", cells), (f"{kind}_differ", self.differ[kind]))
        }


def compare_with_reference(report: dict[str, Any], choices: Choices) -> list[ComparedCells]:
    """Compare each batch's signatures, decode counts, routes and step records with uncached results.

    Raises:
        ValueError: a batch has no record of some request.
    """
    batches = _complete_batches(report)
    cells_of_batches = [ComparedCells(_KINDS) for _ in batches]
    for record in report["records"]:
        number, prompt = _batch(record["request"]), len(record["prompt"])
        chosen = choices(record["prompt"] + record["output"])
        decoded = chosen[prompt:-1]  # the last token never reaches the gates
        counts = unpack_counts(record["eldr_prefill"])
        cells, tokens = cells_of_batches[number], batches[number].tokens
        cells.add("signature", counts, histogram(chosen[:prompt], counts.shape))
        cells.add("decode", unpack_counts(record["eldr_decode"]), histogram(decoded, counts.shape))
        cells.add("decode", [record["eldr_decode_steps"]] * 2, [len(decoded), tokens - 1])
        cells.add("route", np.sort(unpack_routes(record["eldr_routes"])), np.sort(decoded))
    sequences = {r["request"]: r["prompt"] + r["output"] for r in report["records"]}
    for step in report["steps"]:
        fed = step["fed"]
        layers = np.stack([choices(sequences[name])[position] for name, position in fed], 1)  # [L,n,k]
        active = [len(np.unique(layer)) for layer in layers]
        expected = [len(fed), sum(position + 1 for _, position in fed), *active]
        cells_of_batches[_batch(fed[0][0])].add("step", _integers(step), expected)
    return cells_of_batches


def compare_with_report(report: dict[str, Any], other: dict[str, Any]) -> list[ComparedCells]:
    """Compare each batch's tokens, signatures, counts, routes and step records with another engine's.

    Raises:
        ValueError: a batch has no record of some request.
    """
    _complete_batches(other)
    cells_of_batches = [ComparedCells(("token", *_KINDS)) for _ in _complete_batches(report)]
    other_records = {record["request"]: record for record in other["records"]}
    for record in report["records"]:
        pair, cells = (record, other_records[record["request"]]), cells_of_batches[_batch(record["request"])]
        cells.add("token", *(record["output"] for record in pair))
        cells.add("signature", *(unpack_counts(record["eldr_prefill"]) for record in pair))
        cells.add("decode", *(unpack_counts(record["eldr_decode"]) for record in pair))
        cells.add("route", *(np.sort(unpack_routes(record["eldr_routes"])) for record in pair))
    for step, as_step in zip_longest(report["steps"], other["steps"]):  # a missing step differs
        cells = cells_of_batches[_batch((step or as_step)["fed"][0][0])]
        cells.add("step", *(_integers(each) if each else [] for each in (step, as_step)))
    return cells_of_batches


def _complete_batches(report: dict[str, Any]) -> list[Batch]:
    """Return the batches; raise ValueError unless each has a record of every request."""
    batches = [Batch(*batch) for batch in report["batches"]]
    records = Counter(_batch(record["request"]) for record in report["records"])
    for number, batch in enumerate(batches):
        if records[number] != batch.requests:
            raise ValueError(f"batch {number} has {records[number]} records of {batch.requests} requests")
    return batches


def _integers(step: dict[str, Any]) -> list[int]:
    return [step["requests"], step["kv_tokens"], *step["active_by_layer"]]


def _batch(request: str) -> int:
    return int(request.split("-")[0])


def histogram(chosen: NDArray[np.integer[Any]], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return int[L,E] counts of choices int[T,L,k]."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (np.arange(shape[0])[None, :, None], chosen), 1)
    return counts
