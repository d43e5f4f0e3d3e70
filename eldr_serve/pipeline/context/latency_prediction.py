"""Predicted latencies of a request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LatencyPrediction:
    """Predicted latencies of a request at its admission.

    Attributes:
        ttft_s: time to the first token, s, by each worker that may prefill the prompt; empty if unknown.
        tpot_s: time between tokens at the decode worker where it is shortest, s; None if unknown.
        load: requests that the least loaded decode worker would have with this one.
        ttft_margin_s, tpot_margin_s: what is added to the predictions, s (see PredictionAccuracy).
    """

    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: float | None = None
    load: float = 1.0
    ttft_margin_s: float = 0.0
    tpot_margin_s: float = 0.0
