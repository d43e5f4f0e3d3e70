"""NIXL's pull connector, and corrections of its behaviour, in vLLM's engine core and workers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError, check_names, internal_imports

with internal_imports():
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
        NixlBaseConnector,
        NixlPullConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform

__all__ = [
    "NixlBaseConnector",
    "NixlConnectorMetadata",
    "NixlKVConnectorStats",
    "NixlPromMetrics",
    "NixlPullConnector",
    "SideChannel",
    "WithoutTransfers",
    "check_side_channel",
    "check_vllm_names",
    "copy_transfers",
    "disable_progress_thread",
    "expire_send_leases",
    "get_kv_transfer_group",
    "get_tensor_model_parallel_rank",
    "has_kv_transfer_group",
    "restore_affinity",
    "transfer_errors",
]

logger = logging.getLogger(__name__)


def check_side_channel(scheduler: Any) -> None:
    """Raise UnsupportedEngineError if NIXL's side channel cannot listen; vLLM would wait without end."""
    if scheduler._nixl_handshake_listener_t is not None:
        return  # it listens already
    host, port = scheduler.side_channel_host, scheduler.side_channel_port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise UnsupportedEngineError(
            f"NIXL's side channel cannot listen at {host}:{port} ({error.strerror}); set "
            "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine, and VLLM_NIXL_SIDE_CHANNEL_PORT to a "
            "free port; under Ray set NIXL_SIDE_CHANNEL_PORT_BASE in experimental_configs instead of the port"
        ) from error


class SideChannel:
    """The listener of NIXL's scheduler for handshakes with other engines.

    One malformed packet to its port ends vLLM's listener, so it is restarted when it has stopped.

    Args:
        scheduler: NIXL's scheduler side.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._metadata: dict[tuple[int, int], Any] = {}

    def open(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Listen, and serve the handshake metadata of each (pipeline rank, tensor rank).

        Raises:
            UnsupportedEngineError: the address is not this machine's, or the port is taken.
        """
        check_side_channel(self._scheduler)
        self._scheduler.set_xfer_handshake_metadata(metadata)
        self._metadata = metadata

    def has_stopped(self) -> bool:
        """Return whether the listener was opened and has ended."""
        if not self._metadata:
            return False
        listener = self._scheduler._nixl_handshake_listener_t
        return listener is None or not listener.is_alive()

    def reopen_if_stopped(self) -> None:
        """Listen again if the listener has stopped; if that fails, log the error."""
        if not self.has_stopped():
            return
        logger.warning("NIXL's side channel had stopped listening; restarting it")
        self._scheduler._nixl_handshake_listener_t = None
        try:
            self.open(self._metadata)
        except UnsupportedEngineError:  # the next request tries again
            logger.exception("NIXL's side channel does not start")


def copy_transfers(source: Any, target: NixlConnectorMetadata) -> None:
    """Copy a step's transfers, which are all attributes of NIXL's metadata, to metadata of a subclass."""
    target.__dict__.update(source.__dict__)


def expire_send_leases(worker: Any, engine_ids: Iterable[str]) -> None:
    """End the leases of finished prompts; the next check of transfers frees their blocks."""
    for engine_id in engine_ids:
        if engine_id in worker._reqs_to_send:
            worker._reqs_to_send[engine_id] = 0.0


@contextmanager
def restore_affinity() -> Iterator[None]:
    """Restore this thread's CPU affinity on exit.

    On CPUs NIXL's worker binds the thread that creates it to the last core of each NUMA node, to keep
    transfers off the cores of the model. But this thread also runs the model, so all engines of a machine
    would share one core.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Raise UnsupportedEngineError for a KV cache that NIXL cannot transfer."""
    try:
        yield
    except NotImplementedError as error:
        raise UnsupportedEngineError(
            f"NIXL cannot transfer this model's KV cache ({error}); leave prefill_config out: whole replicas "
            "transfer nothing"
        ) from error


class WithoutTransfers:
    """A stand-in for NIXL's scheduler side and worker side in an engine that transfers no KV."""

    use_host_buffer = False
    copy_blocks = xfer_handshake_metadata = None
    pcp_rank = 0

    def __init__(self) -> None:
        self._reqs_to_send: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in _NO_OPERATIONS:
            raise AttributeError(name)
        return lambda *_, **__: None

    def build_connector_meta(self, scheduler_output: Any) -> NixlConnectorMetadata:
        """Return metadata without transfers."""
        return NixlConnectorMetadata()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return that no KV comes from another engine."""
        return 0, False

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Free the blocks at once; return a dict for the signature if the request is a prefill."""
        prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {} if prefill else None

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return no results."""
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return no blocks."""
        return set()

    def has_pending_push_work(self) -> bool:
        """Return False."""
        return False


_NO_OPERATIONS = {
    "get_kv_connector_stats",
    "on_new_request",
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
}


@contextmanager
def disable_progress_thread() -> Iterator[None]:
    """Make NIXL agents without a progress thread on CPUs, where engines share cores.

    The thread spins: it takes a whole core for each engine, even an idle one, and vLLM has no setting for it.
    Without the thread, transfers progress when the engine checks them in every step. The engine runs steps as
    long as a transfer or a lease is open.
    """
    original = getattr(base_worker, "nixl_agent_config", None)
    if not current_platform.is_cpu() or original is None:
        yield
        return
    base_worker.nixl_agent_config = partial(original, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original


def check_vllm_names() -> None:
    """Raise UnsupportedEngineError if vLLM lacks a name that this module or EldrConnector uses."""
    check_names(
        "the ELDR connector",
        (NixlPullConnector, "bind_kv_cache_manager"),
        (NixlPullConnector, "finish_forward"),
        (NixlPullConnector, "build_connector_worker_meta"),
        (NixlPullConnector, "request_finished_all_groups"),
        (NixlPullConnector, "get_transfer_results"),
        (base_worker, "nixl_agent_config"),
    )
