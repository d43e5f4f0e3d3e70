"""Published expert choices of real models, read as calibration traces.

A file has one JSON object a line, plain or gzip, with `id`, `domain` and `routes`: the experts that each
token chose, tokens x MoE layers x k in this order. `routes` is a list of ids, or a string of letters whose
places in the model's alphabet are the ids. `MODELS` has the known models, and names the field with the number
of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.validation import unknown_name
from loadgen.text_files import numbered_lines

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_FILE_REMEDY = "get the whole file again"
_MODEL_REMEDY = f"{_FILE_REMEDY}, or name its model by `eldr routes --model`"
_UNKNOWN = 2**16 - 1  # id of a letter that names no expert


@dataclass(frozen=True)
class Cut:
    """Division of a sample's tokens into prompt and answer.

    Attributes:
        prompt_tokens: number of first tokens that are the prompt; None: by `prompt_share`.
        prompt_share: share of the sample that is the prompt, rounded down, at least one token.
        output_tokens: maximum tokens after the prompt that are the answer; None: all.
        min_output_tokens: samples with a shorter answer are left out.
    """

    prompt_tokens: int | None = None
    prompt_share: float = 0.5
    output_tokens: int | None = None
    min_output_tokens: int = 1

    def lengths(self, tokens: int) -> tuple[int, int]:
        """Return the numbers of prompt and answer tokens of a sample. The second may be 0 or negative."""
        share = max(1, int(self.prompt_share * tokens))
        prompt = share if self.prompt_tokens is None else self.prompt_tokens
        rest = tokens - prompt
        return prompt, rest if self.output_tokens is None else min(rest, self.output_tokens)


@dataclass(frozen=True)
class RouteFileFormat:
    """The shape of a known model and the format of its file.

    Attributes:
        alphabet: letters of `routes`; the place of a letter is the expert's id.
        tokens_field: field with the number of tokens.
        max_tokens: maximum number of tokens whose routes a record has; None: it has those of all tokens.
        cut: cut that the command uses by default.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    alphabet: str
    tokens_field: str
    max_tokens: int | None = None
    cut: Cut = Cut()

    def counts(self, routes: NDArray[np.uint16]) -> NDArray[np.uint32]:
        """Return uint32[L, E] of routes[T, L, k]."""
        cells = routes + np.arange(self.layers)[:, None] * self.experts
        counts = np.bincount(cells.ravel(), minlength=self.layers * self.experts)
        return counts.reshape(self.layers, self.experts).astype(np.uint32)


# GPT-OSS-20B's records have decode steps only; the first ones serve as the prompt.
MODELS = {
    model.name: model
    for model in (
        RouteFileFormat("deepseek-v2-lite", 26, 64, 6, BASE64, "tokens"),
        RouteFileFormat("gpt-oss-20b", 24, 32, 4, BASE32, "decode_tokens", 256, Cut(96, 0.5, 64, 64)),
    )
}


class Sample(NamedTuple):
    """A record of a file, and its routes uint16[T, L, k]."""

    record: dict[str, Any]
    routes: NDArray[np.uint16]


def find_model(name: str) -> RouteFileFormat:
    """Return a known model; raise UserInputError, which lists the models, for others."""
    if name not in MODELS:
        raise UserInputError(unknown_name("", name, MODELS, "model"))
    return MODELS[name]


def read_samples(
    path: Path, model: RouteFileFormat | None = None, on_sample: Callable[[], None] = lambda: None
) -> tuple[RouteFileFormat, list[Sample]]:
    """Read a file's samples; without a model, recognise it by the fields of the first record.

    Raises:
        UserInputError: the file cannot be read, or a line is not a record; the message names line and field.
    """
    samples: list[Sample] = []
    lines: dict[str, int] = {}
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        record = _parse_record(where, line)
        model = model or _recognise_model(where, record)
        samples.append(Sample(record, _parse_routes(where, record, model)))
        if (before := lines.setdefault(str(record["id"]), number)) != number:
            raise UserInputError(f"{where}: id {record['id']!r} is that of line {before}; remove one of them")
        on_sample()
    if model is None:
        raise UserInputError(f"{path} is empty: {_FILE_REMEDY}")
    return model, samples


def trace_of_routes(
    model: RouteFileFormat, samples: Iterable[Sample], cut: Cut | None = None
) -> CalibrationTrace:
    """Return the samples that are long enough as a trace; the default cut is the model's.

    Raises:
        UserInputError: no sample is long enough.
    """
    cut = cut or model.cut
    usable = select_long_enough(samples, cut)
    if not usable:
        raise UserInputError(
            f"no sample of {model.name} has an answer of {cut.min_output_tokens} tokens after its prompt: "
            "take a shorter prompt or a smaller minimum"
        )
    prompts, answers = [], []
    for _, routes in usable:
        prompt, output = cut.lengths(len(routes))
        prompts.append(routes[:prompt])
        answers.append(routes[prompt : prompt + output])
    steps = np.array([len(answer) for answer in answers], np.uint32)
    kind = np.uint8 if model.experts <= 2**8 else np.uint16
    return CalibrationTrace(
        model=model.name,
        top_k=model.top_k,
        prefill_counts=np.stack([model.counts(p) for p in prompts]),
        decode_counts=np.stack([model.counts(a) for a in answers]),
        decode_steps=steps,
        prompt_tokens=np.array([len(prompt) for prompt in prompts], np.uint32),
        domains=[str(sample.record["domain"]) for sample in usable],
        ids=[str(sample.record["id"]) for sample in usable],
        routes=np.concatenate(answers).astype(kind),
        route_offsets=np.concatenate([[0], np.cumsum(steps, dtype=np.int64)]),
    )


def select_long_enough(samples: Iterable[Sample], cut: Cut) -> list[Sample]:
    """Return the samples whose answer has the minimum number of tokens."""
    return [s for s in samples if cut.lengths(len(s.routes))[1] >= max(1, cut.min_output_tokens)]


def read_trace_of_routes(path: Path, model: str | None = None, **cut: Any) -> CalibrationTrace:
    """Read a file as a trace; the given fields of `Cut` replace those of the model's default cut.

    Raises:
        UserInputError: as `read_samples` and `trace_of_routes`; the message names the file.
    """
    route_model, samples = read_samples(path, None if model is None else find_model(model))
    try:
        return trace_of_routes(route_model, samples, replace(route_model.cut, **cut))
    except UserInputError as error:
        raise UserInputError(f"{path}: {error}") from None


def _parse_record(where: str, line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserInputError(f"{where} is not JSON ({error}): {_FILE_REMEDY}") from None
    for name in ("id", "domain", "routes"):
        if not isinstance(record, dict) or name not in record:
            raise UserInputError(f"{where} has no field {name!r}: {_FILE_REMEDY}")
    return record


def _recognise_model(where: str, record: dict[str, Any]) -> RouteFileFormat:
    for model in MODELS.values():
        if model.tokens_field in record:
            return model
    fields = " or ".join(f"{model.tokens_field!r} ({name})" for name, model in MODELS.items())
    raise UserInputError(f"{where} has no field {fields}, so that its model is unknown: {_MODEL_REMEDY}")


def _parse_routes(where: str, record: dict[str, Any], model: RouteFileFormat) -> NDArray[np.uint16]:
    """Return uint16[T, L, k] of a record."""
    tokens = record.get(model.tokens_field)
    if not isinstance(tokens, int) or tokens < 1:
        raise UserInputError(
            f"{where}: {model.tokens_field} of {model.name} is {tokens!r}, not a number of tokens: "
            f"{_MODEL_REMEDY}"
        )
    ids = _expert_ids(record["routes"], model.alphabet)
    per_token = model.layers * model.top_k
    expected = min(tokens, model.max_tokens or tokens) * per_token
    if ids is None or len(ids) != expected:
        content = "neither letters nor ids" if ids is None else f"{len(ids)} experts"
        raise UserInputError(
            f"{where}: routes are {content}, not {expected} of {tokens} tokens of {model.name}: "
            f"{_MODEL_REMEDY}"
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= model.experts))
    if len(wrong):
        position = int(wrong[0])
        layer, choice = divmod(position % per_token, model.top_k)
        raise UserInputError(
            f"{where}: routes[{position}] is {record['routes'][position]!r} (token {position // per_token}, "
            f"layer {layer}, choice {choice}), which names none of the {model.experts} experts of "
            f"{model.name}: {_MODEL_REMEDY}"
        )
    routes = ids.astype(np.uint16).reshape(-1, model.layers, model.top_k)
    return _check_distinct(where, routes, model)


def _expert_ids(routes: Any, alphabet: str) -> NDArray[np.int64] | None:
    """Return the ids that letters or the entries of a list stand for; None if `routes` is anything else.

    A letter outside the alphabet gets the id _UNKNOWN.
    """
    if isinstance(routes, str):
        values = np.full(256, _UNKNOWN, np.int64)
        values[np.frombuffer(alphabet.encode(), np.uint8)] = np.arange(len(alphabet))
        return values[np.frombuffer(routes.encode("latin-1", "replace"), np.uint8)]
    if isinstance(routes, list) and all(type(expert) is int for expert in routes):
        return np.array([min(max(expert, -1), _UNKNOWN) for expert in routes], np.int64)
    return None


def _check_distinct(where: str, routes: NDArray[np.uint16], model: RouteFileFormat) -> NDArray[np.uint16]:
    ordered = np.sort(routes, axis=2)
    repeated = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
    if len(repeated):
        token, layer = repeated[0].tolist()
        raise UserInputError(
            f"{where}: routes name an expert of layer {layer} twice for token {token}, which {model.name} "
            f"cannot choose: {_MODEL_REMEDY}"
        )
    return routes
