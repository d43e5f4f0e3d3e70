"""The expert counts of one served request, as engines report them to the signature pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ExpertSample:
    """Prefill and decode expert counts of one request.

    Attributes:
        request_id: unique in the application.
        domain: label from the client; empty if there is none.
        token_ids: uint32[n], token ids of the prompt.
        prefill_counts: unsigned[L,E], number of prompt tokens routed to each expert of each MoE layer.
        decode_counts: unsigned[L,E], the same for generated tokens that were routed in decode steps.
        decode_steps: number of decode steps in `decode_counts`.
    """

    request_id: str
    domain: str
    token_ids: NDArray[np.uint32]
    prefill_counts: NDArray[np.unsignedinteger]
    decode_counts: NDArray[np.unsignedinteger]
    decode_steps: int
