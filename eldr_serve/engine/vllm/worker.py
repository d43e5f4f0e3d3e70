"""Methods of vLLM's workers for `collective_rpc`; set as `worker_extension_cls`.

None of them raises: after an exception in one rank, vLLM would return answers to the wrong calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eldr_serve.engine.vllm.compat.checked import internal_imports

with internal_imports():
    from eldr_serve.engine.vllm.compat.nixl import get_kv_transfer_group, has_kv_transfer_group

if TYPE_CHECKING:
    from eldr_serve.engine.vllm.ep.live import LiveExperts, RankMethod
    from eldr_serve.engine.vllm.eplb_placement import EplbExperts


class EldrWorkerExtension:
    """Mixin of vLLM's worker.

    Attributes:
        eldr_called_together: whether a call reaches data-parallel ranks between the same two steps, so that
            they can move experts. It does not if vLLM's client makes the call.
    """

    vllm_config: Any
    eldr_called_together = False
    _eldr_experts: LiveExperts | EplbExperts | None = None  # PlacedWorker sets it

    def eldr_abandon(self, names: list[str]) -> None:
        """Free the blocks of prompts that no decode engine will read, once the prompts have ended."""
        if has_kv_transfer_group():
            get_kv_transfer_group().abandon(names)

    def eldr_experts(self, method: RankMethod, *arguments: Any) -> Any:
        """Call a method of the experts and return its result; a str is the reason of a refusal."""
        try:
            return getattr(self._live_experts(), method)(*arguments)
        except ValueError as error:
            return str(error)

    def _live_experts(self) -> LiveExperts | EplbExperts:
        """Return the experts of this worker; raise ValueError if they cannot be moved."""
        if self._eldr_experts is None:
            from eldr_serve.engine.vllm.compat.ep import live_experts  # this imports vLLM's MoE layers

            self._eldr_experts = live_experts(self.vllm_config, self.eldr_called_together)
        return self._eldr_experts
