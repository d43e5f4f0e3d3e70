"""The fleets of an application's engine deployments."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_serve.fleet.fleet import Fleet
from eldr_serve.pipeline.path_options import PrefillRouterOptions


@dataclass(frozen=True)
class Fleets:
    """The fleets of prefill and of decode engines; `prefill` has no replicas if decode engines prefill."""

    prefill: Fleet
    decode: Fleet
    prefill_options: PrefillRouterOptions
    whole: bool = False  # decode engines prefill too
