"""Channels of an ingress replica to all engine replicas of one deployment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from eldr_serve.channel import Call, Channel, ChannelLostError
from eldr_serve.channel.address import Address
from eldr_serve.engine.methods import SLOT_METHODS
from eldr_serve.engine.protocol import EngineRequest
from eldr_serve.engine.report_fields import ADDRESS
from eldr_serve.fleet.directory import ReplicaDirectory, workers_of
from eldr_serve.fleet.waiters import Waiters
from eldr_serve.scheduling.worker_names import rank_of, replica_of

logger = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.5, 5.0  # time to the next try to connect; it doubles with each failure
_GATHER_S = 0.05  # reports that arrive within this time are processed together


class Fleet:
    """Channels to all replicas that Serve knows, for use in one event loop.

    Calls name a worker; calls to the data-parallel ranks of a replica share its channel.

    Args:
        directory: directory of the deployment's replicas.
        max_kv_usage: see KvUsage.

    Attributes:
        waiters: requests that wait for other live replicas or for a report.
    """

    def __init__(self, directory: ReplicaDirectory, *, max_kv_usage: float = 1.0) -> None:
        self.directory = directory
        directory.set_max_kv_usage(max_kv_usage)
        self.waiters = Waiters()
        self._channels: dict[str, Channel] = {}
        # Tasks for all replicas, even for those that have gone.
        self._connection_tasks: dict[str, asyncio.Task[None]] = {}
        self._live_workers: tuple[str, ...] = ()
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._sample_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to follow the directory."""
        loop = asyncio.get_running_loop()

        def changed() -> None:  # any thread may call it
            loop.call_soon_threadsafe(self._follow_directory)

        self.directory.watch(changed)

    async def stop(self) -> None:
        """Close all channels."""
        self.directory.watch(lambda: None)
        if self._sample_timer is not None:
            self._sample_timer.cancel()
        tasks = list(self._connection_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def live_workers(self) -> tuple[str, ...]:
        """Return the names of the workers that take calls, sorted."""
        return self._live_workers

    @property
    def open_calls(self) -> dict[str, int]:
        """Return the number of this process's open calls to the replica of each live worker."""
        return {worker: self._channels[replica_of(worker)].in_flight for worker in self._live_workers}

    def slot_calls_of(self, worker: str) -> int:
        """Return the number of this process's calls to a worker that need a slot; 0 if it is not live."""
        channel = self._channels.get(replica_of(worker))
        if channel is None or not channel.is_open:
            return 0
        return channel.count_calls(SLOT_METHODS, rank_of(worker))

    @property
    def oldest_call_ages_s(self) -> dict[str, float]:
        """Return the age of this process's oldest open call to the replica of each live worker, s."""
        return {name: round(self._channels[replica_of(name)].oldest_s, 1) for name in self._live_workers}

    def is_connected(self, replica: str) -> bool:
        """Return whether there is a channel to a replica, which may take no further calls."""
        return replica in self._channels

    def call(self, worker: str, method: str, request: EngineRequest) -> Call:
        """Start a call; raise ChannelLostError if there is no channel to the worker's replica.

        A call to a data-parallel rank names the rank (see EngineRequest.rank).
        """
        replica, rank = replica_of(worker), rank_of(worker)
        channel = self._channels.get(replica)
        if channel is None:
            raise ChannelLostError(f"there is no channel to {replica}")
        if rank != request.rank:
            request = msgspec.structs.replace(request, rank=rank)
        return channel.call(method, request, group=rank)

    def _follow_directory(self) -> None:
        for replica in self.directory.metadata:
            task = self._connection_tasks.get(replica)
            if task is None or task.done():  # a task that has ended by itself has failed
                task = asyncio.get_running_loop().create_task(self._keep_connected(replica))
                self._connection_tasks[replica] = task
        self._update()

    async def _keep_connected(self, replica: str) -> None:
        """Connect, and reconnect after a loss, while Serve knows the replica.

        The channel of a replica that has gone stays open for its streams until the replica closes it. A
        replica that returns before then keeps its channel.
        """
        retry_s = _RETRY_S
        while replica in self.directory.metadata:
            try:
                address = Address(**self.directory.metadata[replica][ADDRESS])
                channel = await address.connect(self._update)
            except (ChannelLostError, KeyError, TypeError) as error:
                if retry_s == _RETRY_S:
                    logger.warning("cannot connect to replica %s yet: %r", replica, error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
                continue
            if retry_s > _RETRY_S:
                # This is a warning too, since it ends the warning above.
                logger.warning("connected to replica %s", replica)
                retry_s = _RETRY_S
            self._channels[replica] = channel
            channel.on_report = partial(self._add_report, replica)
            self._update()
            try:
                reason = await asyncio.shield(channel.closed)
            finally:
                channel.close("the ingress stops")
                if self._channels.get(replica) is channel:
                    del self._channels[replica]
                self._update()
            logger.warning("the channel to replica %s is closed: %s", replica, reason)
        del self._connection_tasks[replica]

    def _add_report(self, replica: str, report: Mapping[str, Any]) -> None:
        self._reports[replica] = report
        if self._sample_timer is None:
            self._sample_timer = asyncio.get_running_loop().call_later(_GATHER_S, self._sample_reports)

    def _sample_reports(self) -> None:
        self._sample_timer = None
        metadata = self.directory.metadata
        self._reports = {replica: report for replica, report in self._reports.items() if replica in metadata}
        self.directory.update_reports({replica: self._reports.get(replica, {}) for replica in metadata})
        self.waiters.wake()

    def _update(self) -> None:
        """Update the live workers: their replica is known to Serve, connected and not draining."""
        metadata = self.directory.metadata
        live_metadata = {
            replica: metadata[replica]
            for replica in metadata
            if replica in self._channels and self._channels[replica].is_open
        }
        self._live_workers = tuple(sorted(workers_of(live_metadata)))
        self.waiters.wake()
