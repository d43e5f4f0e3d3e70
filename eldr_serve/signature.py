"""Expert signatures (ELDR, section 4.2): from the counts of a prompt's experts to a unit vector.

Array sizes: L MoE layers, E experts a layer, N requests, n layers kept.
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

Counts = NDArray[np.unsignedinteger[Any]]
Element = Literal["count", "sqrt", "binary"]

TRANSFORMS: dict[str, tuple[Element, bool]] = {  # name -> what a cell is, whether weighted by IDF
    "count": ("count", False),
    "count-idf": ("count", True),
    "sqrt-count": ("sqrt", False),
    "binary": ("binary", False),
}


@dataclass(frozen=True, eq=False)
class SignatureSpec:
    """How counts become a signature.

    Attributes:
        idf: float32[L,E], weight of each cell (ones where the transform has no IDF).
        layers: int64[n], the layers kept, ascending.
        element: what is taken of a count before weighting.

    Raises:
        ValueError: shapes, layers or weights that no signature can have.
    """

    idf: NDArray[np.float32]
    layers: NDArray[np.int64]
    element: Element = "count"

    def __post_init__(self) -> None:
        idf = np.ascontiguousarray(self.idf, np.float32)
        layers = np.unique(np.asarray(self.layers, np.int64))
        if idf.ndim != 2 or not idf.size or not np.isfinite(idf).all() or (idf < 0).any():
            raise ValueError("idf must be a finite, non-negative array [L, E]")
        if not len(layers) or layers[0] < 0 or layers[-1] >= len(idf):
            raise ValueError(f"layers must name at least one of the {len(idf)} layers")
        if self.element not in ("count", "sqrt", "binary"):
            raise ValueError(f"unknown element {self.element!r}")
        for array in (idf, layers):
            array.setflags(write=False)
        object.__setattr__(self, "idf", idf)
        object.__setattr__(self, "layers", layers)

    @property
    def dim(self) -> int:
        """Length n*E of a signature."""
        return len(self.layers) * int(self.idf.shape[1])

    @cached_property
    def _weights(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.idf[self.layers])

    def encode(self, counts: ArrayLike) -> NDArray[np.float32]:
        """float32[..., n*E] of unit norm, from counts[..., L, E]; a row of zeros stays zeros.

        Raises:
            ValueError: counts of another shape.
        """
        array = np.asarray(counts)
        if array.shape[-2:] != self.idf.shape:
            raise ValueError(
                f"counts have shape {array.shape}, the signature is for [..., L, E] = {self.idf.shape}"
            )
        cells = cells_of(array[..., self.layers, :], self.element)
        cells *= self._weights
        flat: NDArray[np.float32] = cells.reshape(*array.shape[:-2], self.dim)
        norm = np.sqrt(np.einsum("...d,...d->...", flat, flat))[..., None]
        np.divide(flat, norm, out=flat, where=norm > 0)
        return flat


def cells_of(counts: NDArray[Any], element: Element) -> NDArray[np.float32]:
    """What a cell of the counts stands for in a signature: 1 where used, its count, or the root of it."""
    if element == "binary":
        return (counts > 0).astype(np.float32)
    cells = counts.astype(np.float32)
    return np.sqrt(cells, out=cells) if element == "sqrt" else cells


# -- the wire form of one prompt's counts -------------------------------------------------------------

_HEADER = struct.Struct("<4sBHH")  # magic, bytes a cell, L, E
_MAGIC = b"ELD1"
_MAX_CELLS = 1 << 20
_STORED_BYTES = 4096  # at most 65535
_ZLIB = b"\x78\x01\x01"  # header, and the one, last block, as it is


def pack_counts(counts: ArrayLike) -> str:
    """ASCII text of counts[L,E], for `kv_transfer_params`.

    Raises:
        ValueError: not a small [L, E] array of non-negative integers below 2**32.
    """
    array = np.asarray(counts)
    if array.ndim != 2 or not 0 < array.size <= _MAX_CELLS or max(array.shape) > 0xFFFF:
        raise ValueError(
            f"counts have shape {array.shape}, they must be [L, E] with at most {_MAX_CELLS} cells"
        )
    if array.dtype.kind not in "ui" or array.min() < 0 or (most := int(array.max())) > 0xFFFFFFFF:
        raise ValueError("counts must be integers from 0 to 2**32 - 1")
    width = next(w for w in (1, 2, 4) if most < 1 << 8 * w)
    cells = array.astype(f"<u{width}").tobytes()
    body = _stored(cells) if len(cells) <= _STORED_BYTES else zlib.compress(cells, level=1)
    return base64.b64encode(_HEADER.pack(_MAGIC, width, *array.shape) + body).decode()


def _stored(data: bytes) -> bytes:
    """As zlib's stream, uncompressed: to set up a compressor takes longer than a few cells are worth."""
    size = len(data)
    return _ZLIB + struct.pack("<HH", size, 0xFFFF ^ size) + data + struct.pack(">I", zlib.adler32(data))


def unpack_counts(text: str) -> NDArray[np.uint32]:
    """uint32[L,E] from pack_counts's text.

    Raises:
        ValueError: anything else, in one sentence.
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
            raise ValueError("packed counts are cut or too long")
    except (binascii.Error, struct.error, zlib.error, UnicodeError, AttributeError) as error:
        raise ValueError(f"not packed counts: {error}") from error
    return np.frombuffer(body, f"<u{width}").reshape(num_layers, num_experts).astype(np.uint32)
