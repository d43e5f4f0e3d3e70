"""What can be asked of a worker by `collective_rpc`; set as vLLM's `worker_extension_cls`."""

from __future__ import annotations

from eldr_serve.engine.compat import get_kv_transfer_group, has_kv_transfer_group


class EldrWorkerExtension:
    """Mixed into vLLM's worker."""

    def eldr_abandon(self, names: list[str]) -> None:
        """Free the blocks of prompts that no decode engine will read, once they have ended."""
        if has_kv_transfer_group():
            get_kv_transfer_group().abandon(names)
