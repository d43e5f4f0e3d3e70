"""NIXL's KV connector with expert counts, which vLLM loads into its engine core and into each worker.

Load it with `kv_connector="EldrConnector", kv_connector_module_path="eldr_serve.engine.vllm.kv.connector"`
(see eldr_serve.engine.vllm.config). Its roles are kv_producer (prefill), kv_consumer (decode) and kv_both
(calibration, and whole replicas, which prefill and decode). An engine with kv_both transfers nothing and runs
without NIXL.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from eldr_serve.engine.vllm.compat.engine import check_engine
from eldr_serve.engine.vllm.compat.kv_cache import counted_group
from eldr_serve.engine.vllm.compat.nixl import (
    NixlBaseConnector,
    NixlPullConnector,
    SideChannel,
    WithoutTransfers,
    copy_transfers,
    disable_progress_thread,
    expire_send_leases,
    restore_affinity,
    transfer_errors,
)
from eldr_serve.engine.vllm.kv.metadata import EldrConnectorMetadata, EldrConnectorWorkerMetadata
from eldr_serve.engine.vllm.kv.scheduler_side import EldrConnectorScheduler
from eldr_serve.engine.vllm.kv.worker_side import EldrConnectorWorker
from eldr_serve.engine.vllm.measurements import PromptCounts
from eldr_serve.engine.vllm.stats import EldrPromMetrics, EldrStats


class EldrConnector(NixlPullConnector):
    """NIXL's pull connector, which also returns expert counts in `kv_transfer_params`.

    vLLM makes one connector for its scheduler and one for each worker. Each has a part from NIXL, which
    transfers blocks, and a part from eldr_serve, which counts experts. In each step:

    1. Scheduler: `build_connector_meta` lists the prompts that end in the step, and their blocks.
    2. Worker: `get_transfer_results` counts experts after the forward, and `build_connector_worker_meta`
       returns the counts.
    3. Scheduler: `take_counts` stores the counts before the step's requests are finished
       (eldr_serve.engine.vllm.scheduler), and `request_finished` adds them to the answer. The answer of a
       whole replica ends much later, so its counts are sent at once, with the stats (`take_prompt_counts`).

    Attributes:
        kv_group: the group of the KV cache in whose blocks tokens are counted.
        scheduler_side, worker_side: the part that counts experts; a connector has only the side of its role.
    """

    scheduler_side: EldrConnectorScheduler
    worker_side: EldrConnectorWorker

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_engine(vllm_config, vllm_config.device_config.device_type)
        self.kv_group = counted_group(vllm_config, kv_cache_config)
        if vllm_config.kv_transfer_config.kv_role == "kv_both":
            # NixlPullConnector's constructor does one thing more than the base class's: it makes the part
            # that transfers blocks, which needs NIXL. The base leaves this part to its subclasses.
            NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
            transfers: Any = WithoutTransfers()
            self.connector_scheduler = transfers if role == KVConnectorRole.SCHEDULER else None
            self.connector_worker = transfers if role == KVConnectorRole.WORKER else None
        else:
            with transfer_errors(), disable_progress_thread(), restore_affinity():
                super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._side_channel = SideChannel(self.connector_scheduler)
            self.scheduler_side = EldrConnectorScheduler(vllm_config, self.kv_group)
        else:
            self.worker_side = EldrConnectorWorker(vllm_config, self.kv_group, kv_cache_config.num_blocks)

    # -- scheduler side ----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.kv_cache_manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not isinstance(self.connector_scheduler, WithoutTransfers):  # otherwise no other engine connects
            self._side_channel.open(metadata)

    def on_new_request(self, request: Any) -> None:
        self._side_channel.reopen_if_stopped()
        if request.prompt_token_ids is not None:
            # NIXL shortens prompts of recurrent models in place; in one process the answer shares the list.
            request.prompt_token_ids = list(request.prompt_token_ids)
        super().on_new_request(request)
        self.scheduler_side.on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = EldrConnectorMetadata()
        copy_transfers(super().build_connector_meta(scheduler_output), meta)
        meta.plan = self.scheduler_side.plan_step(scheduler_output)
        meta.held_prompts = self.scheduler_side.take_held_prompts()
        return meta

    def take_counts(self, meta: EldrConnectorWorkerMetadata) -> None:
        """Store the workers' counts, before the requests of the step are finished."""
        self.scheduler_side.take_counts(meta.counts)

    def take_prompt_counts(self) -> dict[str, PromptCounts]:
        """Return the counts of prompts since the last call; a key is the caller's name of a prompt."""
        return self.scheduler_side.take_prompt_counts()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        holds_blocks, params = super().request_finished(request, block_ids)
        return holds_blocks, self.scheduler_side.request_finished(request, holds_blocks, params)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        holds_blocks, params = super().request_finished_all_groups(request, block_ids)
        return holds_blocks, self.scheduler_side.request_finished(request, holds_blocks, params)

    # -- worker side -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.worker_side.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, EldrConnectorMetadata)
        self.worker_side.start_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not isinstance(self.connector_worker, WithoutTransfers):
            super().start_load_kv(forward_context, **kwargs)
        self.worker_side.start_load_kv(kwargs)

    def finish_forward(self) -> None:
        super().finish_forward()
        self.worker_side.finish_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # Both model runners call this after the forward and before they collect the counts; V1 calls
        # `wait_for_save` later if it drafts tokens (speculative decoding). They also call it after an
        # exception in the forward: then nothing is counted, and that exception must propagate.
        if sys.exc_info()[0] is None:
            self.worker_side.count_step()
        # Do this in every step: a decode engine's heartbeat may have extended a lease since the last step.
        expire_send_leases(self.connector_worker, self.worker_side.abandoned.ids_to_free())
        results = super().get_transfer_results(finished_req_ids)
        self.worker_side.abandoned.forget(results.finished_sending)
        return results

    def build_connector_worker_meta(self) -> EldrConnectorWorkerMetadata | None:
        counts = self.worker_side.take_counts()
        return None if counts is None else EldrConnectorWorkerMetadata(counts)

    def abandon(self, names: list[str]) -> None:
        """Free the blocks of prompts that no decode engine will read, once the prompts have ended."""
        self.worker_side.abandoned.abandon(names)

    # -- stats -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> EldrStats | None:
        transfers = super().get_kv_connector_stats()
        # vLLM also asks the scheduler's connector, which measures nothing.
        return None if self.connector_worker is None else self.worker_side.take_stats(transfers)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EldrStats:
        return EldrStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EldrPromMetrics:
        return EldrPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
