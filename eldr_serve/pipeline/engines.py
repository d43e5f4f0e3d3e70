"""The engine deployments of an application, and prompts that wait on prefill engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eldr_serve.replicas.fleet import Fleet


@dataclass(frozen=True)
class Engines:
    """The two deployments of an application; `prefill` has no replicas if decode engines prefill."""

    prefill: Fleet
    decode: Fleet
    max_load_ratio: float = 1.25  # a prefill replica whose load exceeds the mean by this factor is skipped
    whole: bool = False  # decode engines prefill too


@dataclass(frozen=True)
class HeldPrompt:
    """A prompt whose KV blocks are held by a prefill replica for one decode call."""

    request_id: str
    replica: str
    params: dict[str, Any]
    done_at: float  # time.monotonic()
