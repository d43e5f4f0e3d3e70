"""Prediction of a prompt's expert counts from its token ids alone: a signature before prefill.

The predicted expert frequencies are the mean prompt's frequencies plus the mean of the tokens' contributions.
A token's contribution consists of only r numbers, which an [r, L*E] matrix maps to expert frequencies.
Array sizes: V token ids, L MoE layers, E experts per layer, r rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from eldr_serve.artifact_metadata import ArtifactMetadata, build_artifact, require
from eldr_serve.experts.artifact import Artifact, pack_file, unpack_file

Float32s = NDArray[np.float32]
_SUM_TOLERANCE = 1e-2
_SKEW_TOLERANCE = 1e-2
_MIN_FREQUENCY = 1e-6  # smallest frequency, which prevents rows of zeros


class _PredictorMetadata(ArtifactMetadata):
    schema_: Literal["eldr.signature-predictor/1"] = Field(
        default="eldr.signature-predictor/1", alias="schema"
    )
    tokenizer: str = Field(min_length=1)
    top_k: int = Field(ge=1)


def tokenizer_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return a hash of a tokenizer's vocabulary, as returned by `get_vocab()` of Hugging Face."""
    lines = sorted(f"{index} {token}" for token, index in vocabulary.items())
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class SignaturePredictor(Artifact):
    """A low-rank model of each token's contribution to the expert frequencies of a prompt.

    Attributes:
        model: id of the model.
        tokenizer: fingerprint of the tokenizer (`tokenizer_fingerprint`).
        top_k: experts per token and layer.
        mean: float32[L, E], expert frequencies of a prompt of unseen tokens; each row sums to top_k.
        token_factors: float32[V, r], contribution of each token; zeros for unseen tokens.
        expert_factors: float32[r, L, E], orthonormal directions.
        variance: float32[V], variance of each token's row in units of a prompt's noise; the initial state of
            recursive least squares.
        fingerprint: fingerprint of the trace that the predictor was fitted on.
    """

    model: str
    tokenizer: str
    top_k: int
    mean: Float32s
    token_factors: Float32s
    expert_factors: Float32s
    variance: Float32s
    fingerprint: str = ""

    def __post_init__(self) -> None:
        require(
            self.mean.ndim == 2 and self.mean.size > 0, f"the mean has shape {self.mean.shape}, not [L, E]"
        )
        require(
            self.token_factors.ndim == 2 and len(self.token_factors) > 0,
            f"token factors have shape {self.token_factors.shape}, not [V, r]",
        )
        expected = (self.token_factors.shape[1], *self.mean.shape)
        require(
            self.expert_factors.shape == expected,
            f"expert factors have shape {self.expert_factors.shape}, not {expected}",
        )
        require(self.variance.shape == self.token_factors.shape[:1], "the variance does not have V entries")
        for name in ("mean", "token_factors", "expert_factors", "variance"):
            array = getattr(self, name)
            require(array.dtype == np.float32, f"{name} is not float32")
            require(bool(np.isfinite(array).all()), f"{name} is not finite")
        require(bool((self.variance >= 0).all()), "a variance is negative")
        directions = self.expert_factors.reshape(len(self.expert_factors), self.mean.size)
        skew = abs(directions @ directions.T - np.eye(len(directions)))
        require(not skew.size or float(skew.max()) < _SKEW_TOLERANCE, "the directions are not orthonormal")
        shares = bool((self.mean >= 0).all() and (self.mean <= 1).all())
        sums = abs(self.mean.sum(axis=1) - self.top_k)
        require(
            shares and bool((sums < _SUM_TOLERANCE).all()),
            f"the mean's rows are not shares that add up to {self.top_k} experts per token",
        )

    def predict(self, token_ids: ArrayLike) -> Float32s:
        """Return the expected counts of a prompt, float32[L, E]; like true counts, rows sum to top_k * n.

        Args:
            token_ids: int[n] in the prompt's order; ids outside the vocabulary count as unseen.
        """
        ids = np.asarray(token_ids, np.int64)
        counts = self.frequencies(self.mean_factors(ids))
        counts *= len(ids)
        return counts

    def frequencies(self, mean_factors: Float32s) -> Float32s:
        """Return the expert frequencies float32[L, E] of a prompt whose tokens have these mean factors.

        Each row sums to top_k; after this scaling a frequency may exceed 1.
        """
        frequencies: Float32s = np.tensordot(mean_factors, self.expert_factors, axes=1)
        frequencies += self.mean
        np.clip(frequencies, _MIN_FREQUENCY, 1, out=frequencies)
        frequencies *= self.top_k / frequencies.sum(axis=1, keepdims=True)
        return frequencies

    def mean_factors(self, token_ids: NDArray[np.int64]) -> Float32s:
        """Return the mean of the tokens' factors, float32[r]; ids outside the vocabulary have zeros."""
        in_vocabulary = token_ids[(token_ids >= 0) & (token_ids < len(self.token_factors))]
        rows = self.token_factors.take(in_vocabulary, axis=0)
        # A product with ones is five times as fast as `sum`.
        total: Float32s = np.ones(len(rows), np.float32) @ rows
        total /= np.float32(max(len(token_ids), 1))
        return total

    def require_fit(
        self, *, model: str, tokenizer: str | None = None, shape: tuple[int, int] | None = None
    ) -> None:
        """Check that the predictor was fitted for the served model.

        Args:
            tokenizer: fingerprint of the served tokenizer; None if unknown.
            shape: (L, E) of the served model; None if unknown.

        Raises:
            ArtifactError: the model, the tokenizer or the shape differs.
        """
        served = (model, tokenizer, shape)
        own = (self.model, self.tokenizer, self.mean.shape)
        for name, value, expected in zip(
            ("model", "tokenizer", "layers and experts"), own, served, strict=True
        ):
            require(
                expected is None or value == expected,
                f"the signature predictor is for {name} {value}, not {expected}",
            )

    def to_bytes(self) -> bytes:
        """Return the file's content; equal predictors give equal bytes."""
        metadata = _PredictorMetadata(
            model=self.model, tokenizer=self.tokenizer, top_k=self.top_k, fingerprint=self.fingerprint
        )
        matrices = {"tokens": self.token_factors, "experts": self.expert_factors}
        return pack_file({"mean": self.mean, "variance": self.variance, **matrices}, metadata)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the predictor") -> Self:
        """Parse a file's content; raise ArtifactError if it is invalid."""
        arrays, metadata = unpack_file(data, _PredictorMetadata, name)
        return build_artifact(
            name,
            lambda: cls(
                metadata.model,
                metadata.tokenizer,
                metadata.top_k,
                arrays["mean"],
                arrays["tokens"],
                arrays["experts"],
                arrays["variance"],
                metadata.fingerprint,
            ),
        )
