"""A prompt's expected expert counts, from its token ids alone: a signature before any prefill.

A prompt's expert frequencies are taken for the mean prompt's plus the mean of what its tokens add. What a
token adds is of low rank: r numbers, of which an [r, L*E] matrix makes expert frequencies.
Array sizes: V token ids, L MoE layers, E experts a layer, r rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from eldr_serve.artifacts import Artifact, pack_file, unpack_file
from eldr_serve.records import Record, build, require

Floats = NDArray[np.float32]
_SUM_TOLERANCE = 1e-2
_SKEW_TOLERANCE = 1e-2
_LEAST = 1e-6  # so that a row is never all zeros


class _PredictorRecord(Record):
    schema_: Literal["eldr.signature-predictor/1"] = Field(
        default="eldr.signature-predictor/1", alias="schema"
    )
    tokenizer: str = Field(min_length=1)
    top_k: int = Field(ge=1)


def tokenizer_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Names a tokenizer by its tokens and their ids, as `get_vocab()` of Hugging Face's gives them."""
    lines = sorted(f"{index} {token}" for token, index in vocabulary.items())
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class SignaturePredictor(Artifact):
    """What each token of a prompt adds to its expert frequencies.

    Attributes:
        model: id of the model.
        tokenizer: fingerprint of the tokenizer (`tokenizer_fingerprint`).
        top_k: experts a token and layer.
        mean: float32[L, E], expert frequencies of a prompt of unseen tokens; each row adds up to top_k.
        tokens: float32[V, r]; zeros for a token that was never seen.
        experts: float32[r, L, E], orthonormal.
        variance: float32[V], how uncertain each token's row is, as a multiple of a prompt's noise; recursive
            least squares go on from it.
        fingerprint: of the trace that it was fitted on.
    """

    model: str
    tokenizer: str
    top_k: int
    mean: Floats
    tokens: Floats
    experts: Floats
    variance: Floats
    fingerprint: str = ""

    def __post_init__(self) -> None:
        require(
            self.mean.ndim == 2 and self.mean.size > 0, f"the mean has shape {self.mean.shape}, not [L, E]"
        )
        require(
            self.tokens.ndim == 2 and len(self.tokens) > 0,
            f"tokens have shape {self.tokens.shape}, not [V, r]",
        )
        expected = (self.tokens.shape[1], *self.mean.shape)
        require(self.experts.shape == expected, f"experts have shape {self.experts.shape}, not {expected}")
        require(self.variance.shape == self.tokens.shape[:1], "the variance does not have V entries")
        for name in ("mean", "tokens", "experts", "variance"):
            array = getattr(self, name)
            require(array.dtype == np.float32, f"{name} is not float32")
            require(bool(np.isfinite(array).all()), f"{name} is not finite")
        require(bool((self.variance >= 0).all()), "a variance is negative")
        directions = self.experts.reshape(len(self.experts), self.mean.size)
        skew = abs(directions @ directions.T - np.eye(len(directions)))
        require(not skew.size or float(skew.max()) < _SKEW_TOLERANCE, "the directions are not orthonormal")
        shares = bool((self.mean >= 0).all() and (self.mean <= 1).all())
        sums = abs(self.mean.sum(axis=1) - self.top_k)
        require(
            shares and bool((sums < _SUM_TOLERANCE).all()),
            f"the mean's rows are not shares that add up to {self.top_k} experts a token",
        )

    def predict(self, token_ids: ArrayLike) -> Floats:
        """float32[L, E]: expected counts of the prompt; each row adds up to top_k a token, as true counts do.

        Args:
            token_ids: int[n] in the prompt's order; one outside the vocabulary counts as unseen.
        """
        ids = np.asarray(token_ids, np.int64)
        counts = self.frequencies(self.hidden(ids))
        counts *= len(ids)
        return counts

    def frequencies(self, hidden: Floats) -> Floats:
        """float32[L, E]: the mean and what `hidden` adds, clipped to shares, each row adding up to top_k."""
        p = np.tensordot(hidden, self.experts, axes=1)
        p += self.mean
        np.clip(p, _LEAST, 1, out=p)
        p *= self.top_k / p.sum(axis=1, keepdims=True)
        found: Floats = p
        return found

    def hidden(self, token_ids: NDArray[np.int64]) -> Floats:
        """float32[r]: the mean row of the tokens; those outside the vocabulary have zeros."""
        known = token_ids[(token_ids >= 0) & (token_ids < len(self.tokens))]
        # A product with ones adds rows up five times as fast as `sum` does.
        total: Floats = np.ones(len(known), np.float32) @ self.tokens.take(known, axis=0)
        total /= np.float32(max(len(token_ids), 1))
        return total

    def require_fit(
        self, *, model: str, tokenizer: str | None = None, shape: tuple[int, int] | None = None
    ) -> None:
        """Refuse to serve another model than the one fitted on.

        Args:
            tokenizer: fingerprint of the served one; None while it is not known.
            shape: (L, E) of the served model; None while it is not known.

        Raises:
            ArtifactError: another model, tokenizer or shape.
        """
        served = (model, tokenizer, shape)
        own = (self.model, self.tokenizer, self.mean.shape)
        for name, mine, theirs in zip(("model", "tokenizer", "layers and experts"), own, served, strict=True):
            require(
                theirs is None or mine == theirs,
                f"the signature predictor is for {name} {mine}, not {theirs}",
            )

    def to_bytes(self) -> bytes:
        """The file's content; equal predictors give equal bytes."""
        record = _PredictorRecord(
            model=self.model, tokenizer=self.tokenizer, top_k=self.top_k, fingerprint=self.fingerprint
        )
        arrays = {name: getattr(self, name) for name in ("mean", "tokens", "experts", "variance")}
        return pack_file(arrays, record)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the predictor") -> Self:
        """Parse a file's content; ArtifactError if it is not one."""
        arrays, record = unpack_file(data, _PredictorRecord, name)
        return build(
            name,
            lambda: cls(
                record.model, record.tokenizer, record.top_k, arrays["mean"], arrays["tokens"],
                arrays["experts"], arrays["variance"], record.fingerprint,
            ),
        )  # fmt: skip
