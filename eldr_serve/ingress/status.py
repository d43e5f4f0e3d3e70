"""The status of one ingress replica, as JSON-able values."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.ingress.admission import Gate
from eldr_serve.monitoring.loop_watch import LoopWatch
from eldr_serve.pipeline.admission.prediction_recorder import PredictionRecorder
from eldr_serve.pipeline.admission.prefill_admission import PrefillAdmission
from eldr_serve.pipeline.context.stage_latencies import StageLatencies
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.warmup import Warmup
from eldr_serve.router_client.client import RouterClient
from eldr_serve.scheduling.worker_names import replica_of


class IngressStatus:
    """The status of an ingress replica, gathered from its parts.

    Args:
        model_id: name of the served model.

    Attributes:
        watch: watches the event loop of this process.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        router_client: RouterClient,
        fleets: Fleets,
        prefill_admission: PrefillAdmission,
        prediction_recorder: PredictionRecorder,
        stage_latencies: StageLatencies,
        warmup: Warmup,
        model_id: str,
    ) -> None:
        self._gate = gate
        self._router = router_client
        self._fleets = fleets
        self._prefill_admission = prefill_admission
        self._prediction_recorder = prediction_recorder
        self._stage_latencies = stage_latencies
        self._warmup = warmup
        self.watch = LoopWatch("ingress")
        self._model_id = model_id

    @property
    def not_ready_reason(self) -> str | None:
        """Return what the service waits for before it is ready, one sentence; None if it is ready."""
        return self._warmup.not_ready_reason

    def own_status(self) -> dict[str, Any]:
        """Return the part `ingress` of the status."""
        self._prefill_admission.discard_dead_queues()
        return {
            "in_flight": self._gate.in_flight,
            "waiting": self._gate.limiter.num_waiting,
            "leases": len(self._router.held_leases()),
            "router_unreachable": self._router.router_unreachable,
            "warm_pairs": self._warmup.num_warm_pairs,
            "all_warm": self._warmup.all_warm,
            "ready": self.not_ready_reason is None,
            "prefill_in_flight": self._fleets.prefill.open_calls,
            "prefill_oldest_s": self._fleets.prefill.oldest_call_ages_s,
            "stages": self._stage_latencies.summary(),
            "prefill_wait_s": self._prefill_admission.estimate_waits(),
            "prefill_kv_usage": self._fleets.prefill.directory.kv_usage.usage_by_worker,
            "decode_kv_usage": self._fleets.decode.directory.kv_usage.usage_by_worker,
            "objectives": self._prediction_recorder.status(),
            "experts": self._fleets.decode.directory.experts,
        }

    def public_status(self) -> dict[str, Any]:
        """Return what anyone may read: readiness and size of the service."""
        settings = self._router.settings
        return {
            "model": self._model_id,
            "policy": settings.policy if settings else None,
            "prefill_replicas": len(self._fleets.prefill.live_workers),
            "decode_replicas": len(set(map(replica_of, self._fleets.decode.live_workers))),
            "ingress": {
                "ready": self.not_ready_reason is None,
                "all_warm": self._warmup.all_warm,
                "router_unreachable": self._router.router_unreachable,
                "in_flight": self._gate.in_flight,
                "leases": len(self._router.held_leases()),
            },
            "details": "with Authorization: Bearer ADMIN_KEY",
        }

    async def merge_router_status(self, call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Return the router's answer, with this ingress's own status."""
        try:
            status = await call
        except ACTOR_UNAVAILABLE as error:
            status = {"router": f"unreachable ({type(error).__name__})"}
        loops = status.get("loops", {}) | {self.watch.role: self.watch.status()}
        return status | {"answered_by": self._router.name, "ingress": self.own_status(), "loops": loops}
