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
    decode_engines_prefill: bool = False

    @property
    def prefill_capable(self) -> Fleet:
        """Return the fleet of the engines that prefill."""
        return self.decode if self.decode_engines_prefill else self.prefill

    def known_pairs(self) -> list[tuple[str | None, str]]:
        """Return the pairs of prefill replica and decode worker that Serve knows.

        A whole replica has None in place of a prefill replica.
        """
        prefills: tuple[str | None, ...] = (
            (None,) if self.decode_engines_prefill else self.prefill.directory.known_workers
        )
        return [(prefill, decode) for prefill in prefills for decode in self.decode.directory.known_workers]
