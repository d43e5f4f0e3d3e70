"""The calibration trace: the experts that requests used, recorded by `calibrate` and read by fits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_serve.artifact_metadata import ArtifactMetadata, build_artifact, require
from eldr_serve.errors import UserInputError
from eldr_serve.experts.artifact import Artifact, pack_file, unpack_file


class _TraceMetadata(ArtifactMetadata):
    schema_: Literal["eldr.calibration-trace/1"] = Field(default="eldr.calibration-trace/1", alias="schema")
    top_k: int = Field(ge=1)
    domains: list[str]
    ids: list[str]
    tokenizer: str = ""
    vocabulary: int = Field(default=0, ge=0)


@dataclass(frozen=True, eq=False, kw_only=True)
class CalibrationTrace(Artifact):
    """The experts that N requests used.

    Attributes:
        model: id of the model.
        top_k: experts per token and layer.
        prefill_counts: uint32[N,L,E], number of prompt tokens routed to each expert.
        decode_counts: uint32[N,L,E], number of decode steps routed to each expert.
        decode_steps: uint32[N]; may be 0.
        prompt_tokens: uint32[N].
        domains, ids: N names; a domain may be "".
        routes: uint8|uint16 [sum of steps, L, k], experts of each decode step; or None.
        route_offsets: int64[N+1], start of each request's routes; None if `routes` is None.
        token_ids: uint32[sum of prompt_tokens], concatenated prompts; None in older traces.
        tokenizer: fingerprint of the tokenizer of `token_ids`, "" without them.
        vocabulary: exclusive upper bound of `token_ids`, 0 without them.
    """

    model: str
    top_k: int
    prefill_counts: NDArray[np.uint32]
    decode_counts: NDArray[np.uint32]
    decode_steps: NDArray[np.uint32]
    prompt_tokens: NDArray[np.uint32]
    domains: list[str]
    ids: list[str]
    routes: NDArray[np.unsignedinteger[Any]] | None = None
    route_offsets: NDArray[np.int64] | None = None
    token_ids: NDArray[np.uint32] | None = None
    tokenizer: str = ""
    vocabulary: int = 0

    def __post_init__(self) -> None:
        shape = self.prefill_counts.shape
        require(len(shape) == 3 and min(shape) > 0, f"prefill counts have shape {shape}, not [N, L, E]")
        require(self.decode_counts.shape == shape, f"decode counts have shape {self.decode_counts.shape}")
        for name in ("decode_steps", "prompt_tokens", "domains", "ids"):
            require(np.shape(getattr(self, name)) == shape[:1], f"{name} does not have {shape[0]} entries")
        for name in ("prefill_counts", "decode_counts", "decode_steps", "prompt_tokens"):
            require(getattr(self, name).dtype == np.uint32, f"{name} is not uint32")
        require(1 <= self.top_k <= shape[2], f"top_k is {self.top_k} of {shape[2]} experts")
        require(len(set(self.ids)) == len(self.ids), "two requests have the same id")
        for name, tokens in (("prefill_counts", self.prompt_tokens), ("decode_counts", self.decode_steps)):
            sums = getattr(self, name).sum(axis=2, dtype=np.int64)
            require(
                bool((sums == self.top_k * tokens.astype(np.int64)[:, None]).all()),
                f"{name} do not add up to top_k experts per token in every layer",
            )
        self._check_routes(shape)
        self._check_token_ids()

    def _check_routes(self, shape: tuple[int, ...]) -> None:
        require((self.routes is None) == (self.route_offsets is None), "routes and offsets need each other")
        if self.routes is None or self.route_offsets is None:
            return
        offsets = np.concatenate([[0], np.cumsum(self.decode_steps, dtype=np.int64)])
        require(np.array_equal(self.route_offsets, offsets), "route offsets do not match the decode steps")
        expected = (int(offsets[-1]), shape[1], self.top_k)
        require(self.routes.shape == expected, f"routes have shape {self.routes.shape}, not {expected}")
        require(not self.routes.size or int(self.routes.max()) < shape[2], "a route names an unknown expert")

    def _check_token_ids(self) -> None:
        if self.token_ids is None:
            return
        expected = (int(self.prompt_tokens.sum(dtype=np.int64)),)
        require(self.token_ids.dtype == np.uint32, "token_ids is not uint32")
        require(
            self.token_ids.shape == expected, f"token ids have shape {self.token_ids.shape}, not {expected}"
        )
        require(self.tokenizer != "", "token ids come without the fingerprint of their tokenizer")
        require(
            not self.token_ids.size or int(self.token_ids.max()) < self.vocabulary,
            f"a token id is not below {self.vocabulary}",
        )

    @property
    def prompts(self) -> list[NDArray[np.uint32]]:
        """Return the token ids of each prompt.

        Raises:
            UserInputError: the trace has no token ids.
        """
        if self.token_ids is None:
            raise UserInputError("the trace holds no token ids of its prompts: calibrate again")
        return np.split(self.token_ids, np.cumsum(self.prompt_tokens, dtype=np.int64)[:-1])

    @property
    def decode_probability(self) -> NDArray[np.float32]:
        """Return the share of decode steps that chose each expert, float32[N,L,E] (paper, 4.2.1)."""
        steps = np.maximum(self.decode_steps, 1).astype(np.float32)
        return self.decode_counts.astype(np.float32) / steps[:, None, None]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the content, recorded in artifacts that are made from the trace."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def decode_routes(self, requests: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]]:
        """Return the experts [steps, L, k] of all decode steps of these requests.

        Raises:
            UserInputError: the trace has no routes, or these requests have no decode step.
        """
        if self.routes is None or self.route_offsets is None:
            raise UserInputError("the trace holds no routes: capture it with `eldr calibrate --routes`")
        steps = [np.arange(*self.route_offsets[[r, r + 1]]) for r in requests]
        if not sum(map(len, steps)):
            raise UserInputError("none of the requests has a decode step")
        routes: NDArray[np.unsignedinteger[Any]] = self.routes[np.concatenate(steps)]
        return routes

    def subset_without_routes(
        self, indices: NDArray[np.int64], ids: list[str] | None = None
    ) -> CalibrationTrace:
        """Return a trace of the requests at `indices`, without routes.

        Args:
            ids: new ids, which a trace with repeated requests needs; by default the ids remain.
        """
        return CalibrationTrace(
            model=self.model,
            top_k=self.top_k,
            prefill_counts=self.prefill_counts[indices],
            decode_counts=self.decode_counts[indices],
            decode_steps=self.decode_steps[indices],
            prompt_tokens=self.prompt_tokens[indices],
            domains=[self.domains[i] for i in indices],
            ids=ids or [self.ids[i] for i in indices],
            token_ids=self._token_ids_of(indices),
            tokenizer=self.tokenizer,
            vocabulary=self.vocabulary,
        )

    def _token_ids_of(self, indices: NDArray[np.int64]) -> NDArray[np.uint32] | None:
        if self.token_ids is None:
            return None
        prompts = self.prompts
        token_ids: NDArray[np.uint32] = np.concatenate([self.token_ids[:0], *(prompts[i] for i in indices)])
        return token_ids

    def to_bytes(self) -> bytes:
        """Return the file's content; equal traces give equal bytes."""
        arrays: dict[str, NDArray[Any]] = {
            name: getattr(self, name)
            for name in ("prefill_counts", "decode_counts", "decode_steps", "prompt_tokens")
        }
        if self.routes is not None and self.route_offsets is not None:
            arrays |= {"routes": self.routes, "route_offsets": self.route_offsets}
        if self.token_ids is not None:
            arrays["token_ids"] = self.token_ids
        metadata = _TraceMetadata(
            model=self.model,
            top_k=self.top_k,
            domains=self.domains,
            ids=self.ids,
            tokenizer=self.tokenizer,
            vocabulary=self.vocabulary,
        )
        return pack_file(arrays, metadata)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str = "the trace") -> Self:
        """Parse a file's content; raise ArtifactError if it is invalid."""
        arrays, metadata = unpack_file(data, _TraceMetadata, name)
        return build_artifact(
            name,
            lambda: cls(
                model=metadata.model,
                top_k=metadata.top_k,
                prefill_counts=arrays["prefill_counts"],
                decode_counts=arrays["decode_counts"],
                decode_steps=arrays["decode_steps"],
                prompt_tokens=arrays["prompt_tokens"],
                domains=metadata.domains,
                ids=metadata.ids,
                routes=arrays.get("routes"),
                route_offsets=arrays.get("route_offsets"),
                token_ids=arrays.get("token_ids"),
                tokenizer=metadata.tokenizer,
                vocabulary=metadata.vocabulary,
            ),
        )
