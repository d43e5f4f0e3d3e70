"""The engine deployments of an application."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_serve.fleet.fleet import Fleet
from eldr_serve.pipeline.path_options import PrefillRouterOptions


@dataclass(frozen=True)
class Engines:
    """The two deployments of an application; `prefill` has no replicas if decode engines prefill."""

    prefill: Fleet
    decode: Fleet
    prefill_options: PrefillRouterOptions
    whole: bool = False  # decode engines prefill too
