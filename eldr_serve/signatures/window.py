"""The newest expert samples within bounds, and their conversion to a calibration trace."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.sample import ExpertSample

logger = logging.getLogger(__name__)


Reason = Literal["shape", "other_model", "layers_differ", "odd_total", "incomplete_prompt"]


class SampleError(ValueError):
    """A sample cannot be used. The message is one sentence; `reason` is the kind of fault."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class KeptSample:
    """A validated sample.

    Attributes:
        arrived_at_s: time of arrival, s since 1970.
        top_k: experts per token and layer.
        prompt_tokens: number of prompt tokens, derived from the prefill counts.
    """

    arrived_at_s: float
    sample: ExpertSample
    top_k: int
    prompt_tokens: int

    @property
    def size(self) -> int:
        """Return the size of the arrays, bytes."""
        sample = self.sample
        return sample.prefill_counts.nbytes + sample.decode_counts.nbytes + sample.token_ids.nbytes


class SampleWindow:
    """The newest samples, all of one shape [L, E].

    Args:
        max_bytes: maximum size of the samples' arrays, bytes; the newest sample is always kept.
        keep_token_ids: whether to keep the token ids of prompts.

    Attributes:
        max_samples: maximum number of samples.
        shape: [L, E] of the samples' counts; None until there is one.
        refused: number of refused samples by Reason.
    """

    def __init__(self, max_samples: int, max_bytes: int = 1 << 62, *, keep_token_ids: bool = True) -> None:
        self.max_samples = max_samples
        self.shape: tuple[int, int] | None = None
        self.refused: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._keep_token_ids = keep_token_ids
        self._samples: OrderedDict[str, KeptSample] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> list[KeptSample]:
        """Return the samples, oldest first."""
        return list(self._samples.values())

    @property
    def bytes(self) -> int:
        """Return the size of all arrays, bytes."""
        return self._bytes

    def resize(self, max_samples: int, max_bytes: int, keep_token_ids: bool) -> None:
        """Apply new bounds."""
        self.max_samples, self._max_bytes, self._keep_token_ids = max_samples, max_bytes, keep_token_ids
        self._trim()

    def add(self, samples: Iterable[ExpertSample]) -> int:
        """Add samples; return how many were accepted. Others are counted in `refused`."""
        num_kept = 0
        for sample in samples:
            try:
                self._put(self._validate(sample))
                num_kept += 1
            except SampleError as error:
                if error.reason not in self.refused:
                    logger.warning("expert samples are refused (%s): %s", error.reason, error)
                self.refused[error.reason] += 1
        return num_kept

    def _put(self, sample: KeptSample) -> None:
        name = sample.sample.request_id
        self._drop(name)
        self._samples[name] = sample
        self._bytes += sample.size
        self._trim()

    def _trim(self) -> None:
        while len(self._samples) > self.max_samples or (
            self._bytes > self._max_bytes and len(self._samples) > 1
        ):
            self._drop(next(iter(self._samples)))

    def _drop(self, request_id: str) -> None:
        sample = self._samples.pop(request_id, None)
        if sample is not None:
            self._bytes -= sample.size

    def _validate(self, sample: ExpertSample) -> KeptSample:
        prefill, decode = sample.prefill_counts, sample.decode_counts
        if prefill.ndim != 2 or not prefill.size or decode.shape != prefill.shape:
            shapes = f"{prefill.shape} and {decode.shape}"
            raise SampleError("shape", f"counts have the shapes {shapes}, but both must be [L, E]")
        if self.shape not in (None, prefill.shape):
            assert self.shape is not None
            raise SampleError(
                "other_model",
                f"counts have {prefill.shape[0]} layers x {prefill.shape[1]} experts, but the samples in the "
                f"pool have {self.shape[0]} x {self.shape[1]}: all engines must serve one model",
            )
        routed, generated = _sum_of_each_layer(prefill, "prefill"), _sum_of_each_layer(decode, "decode")
        if sample.decode_steps or generated:
            top_k = _quotient(generated, sample.decode_steps, "decode counts", "the decode steps")
        else:
            top_k = _quotient(routed, len(sample.token_ids), "prefill counts", "the prompt's tokens")
        prompt = _quotient(routed, top_k, "prefill counts", f"top_k {top_k}")
        if len(sample.token_ids) - prompt not in (0, 1):  # the decode engine may compute the last token
            raise SampleError("incomplete_prompt", "prefill counts do not include all tokens of the prompt")
        self.shape = (prefill.shape[0], prefill.shape[1])
        return KeptSample(time.time(), self._compact(sample, prompt), top_k, prompt)

    def _compact(self, sample: ExpertSample, prompt: int) -> ExpertSample:
        """Copy the arrays compactly, since the originals may be views of a whole message."""
        ids = sample.token_ids[: prompt if self._keep_token_ids else 0]
        return replace(
            sample,
            token_ids=np.array(ids, np.uint32),
            prefill_counts=_copy_counts(sample.prefill_counts),
            decode_counts=_copy_counts(sample.decode_counts),
        )


def trace_of_samples(
    samples: Iterable[KeptSample], model: str, *, tokenizer: str = "", vocabulary: int = 0
) -> CalibrationTrace:
    """Return the samples as a calibration trace, in their order and without routes.

    Args:
        samples: the samples; if a request has several, the last one is used.
        tokenizer: fingerprint of the tokenizer of the token ids; if empty, token ids are left out.
        vocabulary: size of the vocabulary.

    Raises:
        ValueError: there are no samples, or they come from different models.
    """
    newest = list({kept.sample.request_id: kept for kept in samples}.values())
    if not newest:
        raise ValueError("the signature pool has no sample yet")
    if len({(kept.top_k, kept.sample.prefill_counts.shape) for kept in newest}) > 1:
        raise ValueError("the samples come from different models")
    has_token_ids = bool(tokenizer) and all(len(kept.sample.token_ids) for kept in newest)
    return CalibrationTrace(
        model=model,
        top_k=newest[0].top_k,
        prefill_counts=np.stack([kept.sample.prefill_counts for kept in newest]).astype(np.uint32),
        decode_counts=np.stack([kept.sample.decode_counts for kept in newest]).astype(np.uint32),
        decode_steps=np.array([kept.sample.decode_steps for kept in newest], np.uint32),
        prompt_tokens=np.array([kept.prompt_tokens for kept in newest], np.uint32),
        domains=[kept.sample.domain for kept in newest],
        ids=[kept.sample.request_id for kept in newest],
        token_ids=np.concatenate([kept.sample.token_ids for kept in newest]) if has_token_ids else None,
        tokenizer=tokenizer if has_token_ids else "",
        vocabulary=vocabulary if has_token_ids else 0,
    )


def _sum_of_each_layer(counts: NDArray[np.unsignedinteger], phase: str) -> int:
    sums = counts.sum(axis=1, dtype=np.int64)
    if (sums != sums[0]).any():
        message = f"{phase} counts differ between layers: each token must pass every layer"
        raise SampleError("layers_differ", message)
    return int(sums[0])


def _quotient(total: int, divisor: int, name: str, unit: str) -> int:
    quotient, rest = divmod(total, divisor) if divisor else (0, 1)
    if rest or not quotient:
        message = f"{name} add up to {total} in a layer, which is not a multiple of {unit}"
        raise SampleError("odd_total", message)
    return quotient


def _copy_counts(counts: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return a copy in the smallest dtype."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
