"""What can be asked of a worker by `collective_rpc`; set as vLLM's `worker_extension_cls`.

No call of ours raises: after a rank has, vLLM takes the next rank's answer for that of the next call.
"""

from __future__ import annotations

from typing import Any

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from eldr_serve.engine.vllm.compat.nixl import get_kv_transfer_group, has_kv_transfer_group


class EldrWorkerExtension:
    """Mixed into vLLM's worker."""

    vllm_config: Any
    _eldr_experts: Any = None  # LiveExperts

    def eldr_abandon(self, names: list[str]) -> None:
        """Free the blocks of prompts that no decode engine will read, once they have ended."""
        if has_kv_transfer_group():
            get_kv_transfer_group().abandon(names)

    def eldr_experts(self, method: str, *arguments: Any) -> Any:
        """What a method of `LiveExperts` returns; a str is a sentence that says why it did nothing."""
        try:
            return getattr(self._experts(), method)(*arguments)
        except ValueError as error:
            return str(error)

    def _experts(self) -> Any:
        """LiveExperts of this worker; ValueError where its experts cannot be moved."""
        if self._eldr_experts is None:
            from eldr_serve.engine.vllm.compat.ep import live_experts  # imports vLLM's MoE layers

            self._eldr_experts = live_experts(self.vllm_config)
        return self._eldr_experts
