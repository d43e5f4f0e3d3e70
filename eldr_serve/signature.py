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
from scipy import stats

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
        cells = _cells(array[..., self.layers, :], self.element)
        cells *= self._weights
        flat: NDArray[np.float32] = cells.reshape(*array.shape[:-2], self.dim)
        norm = np.sqrt(np.einsum("...d,...d->...", flat, flat))[..., None]
        np.divide(flat, norm, out=flat, where=norm > 0)
        return flat


def _cells(counts: NDArray[Any], element: Element) -> NDArray[np.float32]:
    if element == "binary":
        return (counts > 0).astype(np.float32)
    cells = counts.astype(np.float32)
    return np.sqrt(cells, out=cells) if element == "sqrt" else cells


def inverse_document_frequency(prefill_counts: ArrayLike) -> NDArray[np.float32]:
    """float32[L,E] = log((N+1)/(df+1)); df counts the requests that use the expert (section 4.2.2).

    Raises:
        ValueError: counts that are not [N, L, E] with N > 0.
    """
    counts = np.asarray(prefill_counts)
    if counts.ndim != 3 or not len(counts):
        raise ValueError(f"prefill counts have shape {counts.shape}, they must be [N, L, E] with N > 0")
    document_frequency = (counts > 0).sum(axis=0)
    idf: NDArray[np.float32] = np.log((len(counts) + 1) / (document_frequency + 1)).astype(np.float32)
    return idf


def signature_quality(a: ArrayLike, b: ArrayLike, pairs: int = 20000, seed: int = 0) -> float:
    """rho (Eq. 1): Spearman correlation of cosine distances in `a` and in `b`, over random pairs.

    Args:
        a, b: [N, *], two descriptions of the same N >= 3 requests.
        pairs: how many pairs of different requests are drawn.

    Raises:
        ValueError: fewer than three requests, or different numbers of them.
    """
    left, right = (np.asarray(x, np.float32).reshape(len(np.asarray(x)), -1) for x in (a, b))
    if len(left) != len(right) or len(left) < 3:
        raise ValueError(f"need the same 3 or more requests on both sides, got {len(left)} and {len(right)}")
    i, j = _pairs(len(left), pairs, seed)
    result = stats.spearmanr(_cosine_distance(left, i, j), _cosine_distance(right, i, j))
    return float(result.statistic)


@dataclass(frozen=True)
class LayerSelection:
    """Layers in the order in which the greedy search took them, and rho after each.

    Attributes:
        order: int64[L].
        rho: float64[L], rho[n-1] is with the first n layers of `order`.
    """

    order: NDArray[np.int64]
    rho: NDArray[np.float64]

    @property
    def kept(self) -> NDArray[np.int64]:
        """The layers up to the peak of rho, ascending."""
        return np.sort(self.order[: int(np.argmax(self.rho)) + 1])


def select_layers(
    prefill_counts: ArrayLike,
    decode_probability: ArrayLike,
    *,
    idf: ArrayLike | None = None,
    element: Element = "count",
    pairs: int = 5000,
    seed: int = 0,
) -> LayerSelection:
    """Greedy layer mask by rho (section 4.2.2, step 3): always the layer that raises rho most.

    Args:
        prefill_counts: unsigned[N,L,E].
        decode_probability: float[N,L,E], share of decode steps in which the expert was chosen.
        idf: float[L,E]; None for no weights.
        pairs: random pairs of requests that rho is taken over.
    """
    cells = _cells(np.asarray(prefill_counts), element)
    if idf is not None:
        cells = cells * np.asarray(idf, np.float32)
    decode = np.asarray(decode_probability, np.float32)
    i, j = _pairs(len(cells), pairs, seed)
    target = _centred_ranks(_cosine_distance(decode.reshape(len(decode), -1), i, j)[None])[0]
    # The cosine of a set of layers is a sum over its layers, so each layer is looked at once.
    dots = np.stack(
        [np.einsum("pe,pe->p", cells[i, layer], cells[j, layer]) for layer in range(cells.shape[1])]
    )
    squares = np.einsum("nle,nle->ln", cells, cells)
    norms_i, norms_j = squares[:, i], squares[:, j]
    order: list[int] = []
    rhos: list[float] = []
    left = list(range(cells.shape[1]))
    dot, norm_i, norm_j = (np.zeros(len(i), np.float32) for _ in range(3))
    while left:
        norm = np.sqrt((norm_i + norms_i[left]) * (norm_j + norms_j[left]))
        cosine = np.divide(dot + dots[left], norm, out=np.zeros_like(norm), where=norm > 0)
        scores = _centred_ranks(1 - cosine) @ target
        best = int(np.argmax(scores))
        layer = left.pop(best)
        order.append(layer)
        rhos.append(float(scores[best]))
        dot, norm_i, norm_j = dot + dots[layer], norm_i + norms_i[layer], norm_j + norms_j[layer]
    return LayerSelection(np.array(order), np.array(rhos))


def _pairs(num_requests: int, pairs: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if num_requests < 3:
        raise ValueError(f"rho needs 3 or more requests, got {num_requests}")
    rng = np.random.default_rng(seed)
    i = rng.integers(num_requests, size=pairs)
    return i, (i + rng.integers(1, num_requests, size=pairs)) % num_requests


def _cosine_distance(
    x: NDArray[np.float32], i: NDArray[np.int64], j: NDArray[np.int64]
) -> NDArray[np.float32]:
    norm = np.sqrt(np.einsum("nd,nd->n", x, x))
    unit = np.divide(x, norm[:, None], out=np.zeros_like(x), where=norm[:, None] > 0)
    distance: NDArray[np.float32] = 1 - np.einsum("pd,pd->p", unit[i], unit[j])
    return distance


def _centred_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Rows of unit norm whose products are Spearman correlations; a constant row becomes zeros."""
    ranks = stats.rankdata(values, axis=-1)
    ranks -= ranks.mean(axis=-1, keepdims=True)
    norm = np.sqrt((ranks**2).sum(axis=-1, keepdims=True))
    unit: NDArray[np.float64] = np.divide(ranks, norm, out=np.zeros_like(ranks), where=norm > 0)
    return unit


# -- the wire form of one prompt's counts -------------------------------------------------------------

_HEADER = struct.Struct("<4sBHH")  # magic, bytes a cell, L, E
_MAGIC = b"ELD1"
_MAX_CELLS = 1 << 20


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
    if array.dtype.kind not in "ui" or array.min() < 0 or array.max() > 0xFFFFFFFF:
        raise ValueError("counts must be integers from 0 to 2**32 - 1")
    width = next(w for w in (1, 2, 4) if int(array.max()) < 1 << 8 * w)
    body = zlib.compress(array.astype(f"<u{width}").tobytes(), level=1)
    return base64.b64encode(_HEADER.pack(_MAGIC, width, *array.shape) + body).decode()


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
