"""vLLM's NIXL connector without its progress thread on CPU, and with nothing else of ours."""

from __future__ import annotations

from typing import Any

from eldr_serve.engine.compat import NixlPullConnector, polled_nixl


class PolledNixlConnector(NixlPullConnector):
    """The yardstick for what capture adds: the same transfer, no counting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with polled_nixl():
            super().__init__(*args, **kwargs)
