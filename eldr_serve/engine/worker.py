"""What can be asked of a worker by `collective_rpc`; set as vLLM's `worker_extension_cls`."""

from __future__ import annotations

from eldr_serve.engine.compat import get_kv_transfer_group, has_kv_transfer_group


class EldrWorkerExtension:
    """Mixed into vLLM's worker."""

    def eldr_release(self, request_ids: list[str]) -> list[str]:
        """Free finished prompts' blocks now; returns the ids that still held some."""
        return get_kv_transfer_group().release(request_ids) if has_kv_transfer_group() else []
