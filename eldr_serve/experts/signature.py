"""Expert signatures (ELDR, section 4.2): unit vectors, computed from the expert counts of prompts.

This module has no state. The package `eldr_serve.signatures` collects counts of live traffic, and fits
routing tables to their signatures.

Array sizes: L MoE layers, E experts per layer, N requests, n layers kept.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_serve.errors import UserInputError

Counts = NDArray[np.unsignedinteger[Any]]
Element = Literal["count", "sqrt", "binary"]

# Name -> element, and the number added to the IDF to make a weight; None: all weights are 1.
TRANSFORMS: dict[str, tuple[Element, float | None]] = {
    "count": ("count", None),
    "count-idf": ("count", 0.0),  # the paper's: experts that every request uses have no weight
    "count-1+idf": ("count", 1.0),
    "sqrt-count": ("sqrt", None),
    "binary": ("binary", None),
}
DEFAULT_TRANSFORM = "count-1+idf"


@dataclass(frozen=True, eq=False)
class SignatureSpec:
    """Parameters of the conversion of counts to a signature.

    Attributes:
        weights: float32[L,E], weight of each cell: IDF, or ones if the transform has no IDF.
        layers: int64[n], kept layers, ascending.
        element: function applied to each count before weighting.

    Raises:
        UserInputError: invalid shapes, layers or weights.
    """

    weights: NDArray[np.float32]
    layers: NDArray[np.int64]
    element: Element = "count"

    def __post_init__(self) -> None:
        weights = np.ascontiguousarray(self.weights, np.float32)
        layers = np.unique(np.asarray(self.layers, np.int64))
        if weights.ndim != 2 or not weights.size or not np.isfinite(weights).all() or (weights < 0).any():
            raise UserInputError("weights must be a finite, non-negative array [L, E]")
        if not len(layers) or layers[0] < 0 or layers[-1] >= len(weights):
            raise UserInputError(f"layers must name at least one of the {len(weights)} layers")
        if self.element not in ("count", "sqrt", "binary"):
            raise UserInputError(f"unknown element {self.element!r}")
        for array in (weights, layers):
            array.setflags(write=False)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "layers", layers)

    @property
    def dim(self) -> int:
        """Return n*E, the length of a signature."""
        return len(self.layers) * int(self.weights.shape[1])

    @cached_property
    def _kept_weights(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.weights[self.layers])

    def encode(self, counts: ArrayLike) -> NDArray[np.float32]:
        """Return signatures float32[..., n*E] of unit norm; zero counts give zeros.

        Args:
            counts: [..., L, E].

        Raises:
            UserInputError: the counts have another shape.
        """
        array = np.asarray(counts)
        if array.shape[-2:] != self.weights.shape:
            raise UserInputError(
                f"counts have shape {array.shape}, but the signature needs [..., L, E] = {self.weights.shape}"
            )
        cells = cells_of(array[..., self.layers, :], self.element)
        cells *= self._kept_weights
        flat: NDArray[np.float32] = cells.reshape(*array.shape[:-2], self.dim)
        norm = np.sqrt(np.einsum("...d,...d->...", flat, flat))[..., None]
        np.divide(flat, norm, out=flat, where=norm > 0)
        return flat


def cells_of(counts: NDArray[Any], element: Element) -> NDArray[np.float32]:
    """Apply the element function to counts: 1 for used experts, the count itself, or its square root."""
    if element == "binary":
        return (counts > 0).astype(np.float32)
    cells = counts.astype(np.float32)
    return np.sqrt(cells, out=cells) if element == "sqrt" else cells


# -- the wire form of one prompt's counts -------------------------------------------------------------

_HEADER = struct.Struct("<4sBHH")  # magic, bytes per cell, L, E
_MAGIC = b"ELD1"
_MAX_CELLS = 1 << 20
_STORED_BYTES = 4096  # maximum size that is stored uncompressed; must be at most 65535
_ZLIB = b"\x78\x01\x01"  # zlib header, and the header of a single stored block


def pack_counts(counts: ArrayLike) -> str:
    """Encode counts[L,E] as ASCII text for `kv_transfer_params`.

    Raises:
        UserInputError: the counts are not a small [L, E] array of non-negative integers below 2**32.
    """
    array = np.asarray(counts)
    if array.ndim != 2 or not 0 < array.size <= _MAX_CELLS or max(array.shape) > 0xFFFF:
        raise UserInputError(
            f"the shape of counts must be [L, E] with at most {_MAX_CELLS} cells, got {array.shape}"
        )
    if array.dtype.kind not in "ui" or array.min() < 0 or (largest := int(array.max())) > 0xFFFFFFFF:
        raise UserInputError("counts must be integers from 0 to 2**32 - 1")
    width = next(w for w in (1, 2, 4) if largest < 1 << 8 * w)
    cells = array.astype(f"<u{width}").tobytes()
    body = _store_uncompressed(cells) if len(cells) <= _STORED_BYTES else zlib.compress(cells, level=1)
    return base64.b64encode(_HEADER.pack(_MAGIC, width, *array.shape) + body).decode()


def _store_uncompressed(data: bytes) -> bytes:
    """Return an uncompressed zlib stream; for small data, setting up a compressor takes too long."""
    size = len(data)
    return _ZLIB + struct.pack("<HH", size, 0xFFFF ^ size) + data + struct.pack(">I", zlib.adler32(data))


def unpack_counts(text: str) -> NDArray[np.uint32]:
    """Decode the text of pack_counts to uint32[L,E].

    Raises:
        ValueError: the text is invalid.
    """
    try:
        data = base64.b64decode(text.encode(), validate=True)
        magic, width, num_layers, num_experts = _HEADER.unpack_from(data)
        size = num_layers * num_experts * width
        if magic != _MAGIC or width not in (1, 2, 4) or not 0 < size <= 4 * _MAX_CELLS:
            raise ValueError("not packed counts")
        inflater = zlib.decompressobj()
        body = inflater.decompress(data[_HEADER.size :], size + 1)
        if len(body) != size or not inflater.eof:
            raise ValueError("packed counts are truncated or too long")
    except (binascii.Error, struct.error, zlib.error, UnicodeError, AttributeError) as error:
        raise ValueError(f"not packed counts: {error}") from error
    return np.frombuffer(body, f"<u{width}").reshape(num_layers, num_experts).astype(np.uint32)
