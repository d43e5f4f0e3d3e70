"""The serialized routes of one request: the experts that each decode step chose.

The engine core packs them; calibration unpacks them.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<IHH")  # steps, L, k


def pack_routes(routes: NDArray[Any]) -> str:
    """Return expert ids int[steps, L, k], all below 65536, as ASCII text."""
    return base64.b64encode(
        _HEADER.pack(*routes.shape) + zlib.compress(routes.astype("<u2").tobytes(), level=1)
    ).decode()


def unpack_routes(text: str) -> NDArray[np.uint16]:
    """Return uint16[steps, L, k] from the text of pack_routes.

    Raises:
        ValueError: the text has another format.
    """
    try:
        data = base64.b64decode(text, validate=True)
        shape = _HEADER.unpack_from(data)
        return np.frombuffer(zlib.decompress(data[_HEADER.size :]), "<u2").reshape(shape)
    except (ValueError, struct.error, zlib.error) as error:
        raise ValueError(f"not packed routes: {error}") from error
