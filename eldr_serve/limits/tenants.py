"""Tenants, found by their keys, and their rate limits."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path

from eldr_serve.errors import RateLimitedError, RequestRefusedError
from eldr_serve.limits.keys import Keys, KeysError, Limits, bearer_key, digest, read_keys

logger = logging.getLogger(__name__)

_RELOAD_PERIOD_S = 1.0
_SHARE_PERIOD_S = 1.0
# Replicas do not exchange the usage of a longer outage: charged all at once, it would refuse a tenant that
# has kept its limit.
_MAX_OUTAGE_S = 60.0
_SILENT_S = 60.0
Usage = dict[str, tuple[float, float]]  # tenant -> requests and tokens charged since the process began
_MINUTE_S = 60.0
_MAX_RESERVED = 2**31 - 1  # tokens; if a float added many more, it would lose the tenant's other usage


class Bucket:
    """Token bucket with the capacity of one minute, and at least one unit.

    Usage may exceed what is left; the debt must be refilled before the next request. If no request uses more
    than it has reserved, the requests that begin within any t seconds use at most
    `per_minute * (1 + t / 60)` units, plus the last request's units.

    Args:
        per_minute: units per minute; None: no limit.
        clock: returns the time, s.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self.charged = 0.0  # total of this process
        self._clock = clock
        self._used = 0.0
        self._refilled_at_s = clock()
        self._reserved: dict[Hashable, float] = {}  # units not refilled yet, by reservation; oldest first
        self._all_reserved = 0.0  # their sum, at most `_used`

    def set_limit(self, per_minute: float | None) -> None:
        """Change the limit and keep the usage."""
        self._refill()
        self.per_minute = per_minute

    def compute_wait_s(self) -> float:
        """Return the time until one unit is available, s."""
        if self.per_minute is None:
            return 0.0
        self._refill()
        missing = self._used + 1.0 - max(self.per_minute, 1.0)
        return max(missing, 0.0) * _MINUTE_S / self.per_minute

    def charge(self, units: float) -> None:
        """Use units, whatever is left; negative units are returned to the bucket."""
        self.charged += units
        self.add_usage(units)

    def reserve(self, key: Hashable, units: float) -> None:
        """Use units, whatever is left, until `settle` with the same key corrects their number."""
        self.charge(units)
        self._reserved[key] = units
        self._all_reserved += units

    def settle(self, key: Hashable, more: float) -> None:
        """End a reservation; ignored if it has ended and `more` is 0.

        Args:
            more: units used beyond the reservation; negative if not all were used. Of the unused units only
                those that have not been refilled are returned, since the others are available already.
        """
        self._refill()
        returnable = self._reserved.pop(key, 0.0)
        self._all_reserved = self._all_reserved - returnable if self._reserved else 0.0
        self.charge(max(more, -returnable))

    def add_usage(self, units: float) -> None:
        """Count units that this process or another one has used."""
        self._refill()
        self._used = max(self._used + units, 0.0)

    def _refill(self) -> None:
        now_s = self._clock()
        if self.per_minute is None:
            self._used = 0.0
        else:
            self._used = max(self._used - (now_s - self._refilled_at_s) * self.per_minute / _MINUTE_S, 0.0)
            self._shrink_reservations()
        self._refilled_at_s = now_s

    def _shrink_reservations(self) -> None:
        """Reduce the reservations to `_used`, the oldest first; other usage is refilled before them."""
        while self._reserved and self._all_reserved > self._used:
            key, units = next(iter(self._reserved.items()))
            refilled = min(units, self._all_reserved - self._used)
            self._all_reserved -= refilled
            if refilled < units:
                self._reserved[key] = units - refilled
                return
            del self._reserved[key]


class Tenant:
    """One tenant at this ingress replica. The tenant without name stands for all clients without keys."""

    def __init__(
        self, name: str = "", limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        limits = limits or Limits()
        self.priority = limits.priority
        self.objective = limits.objective
        self.requests = Bucket(limits.requests_per_minute, clock)
        self.tokens = Bucket(limits.tokens_per_minute, clock)

    def set_limits(self, limits: Limits) -> None:
        """Apply new limits immediately."""
        self.priority = limits.priority
        self.objective = limits.objective
        self.requests.set_limit(limits.requests_per_minute)
        self.tokens.set_limit(limits.tokens_per_minute)

    def admit(self) -> None:
        """Count one request; raise RateLimitedError if there are too many."""
        self.check(self.requests, "requests")
        self.requests.charge(1.0)

    def check(self, bucket: Bucket, what: str) -> None:
        """Raise RateLimitedError if nothing is left."""
        wait_s = bucket.compute_wait_s()
        if wait_s:
            raise RateLimitedError(
                f"tenant {self.name!r} has used up its {bucket.per_minute:g} {what} per minute",
                retry_after_s=math.ceil(wait_s),
            )


class TokenReservation:
    """The tokens of a tenant's limit that one request reserves; its true usage replaces them at its end."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._count_used_tokens: Callable[[], int] = lambda: 0
        self._reserved = 0

    def reserve(self, tokens: int) -> None:
        """Reserve an estimated number of tokens, which may be any integer, since a client chooses it.

        Raises:
            RateLimitedError: none are left.
        """
        self.tenant.check(self.tenant.tokens, "tokens")
        self._reserved = min(max(tokens, 0), _MAX_RESERVED)
        self.tenant.tokens.reserve(self, self._reserved)

    def count_usage_with(self, count_used_tokens: Callable[[], int]) -> None:
        """From now on count the used tokens with this function; before, the request has used none."""
        self._count_used_tokens = count_used_tokens

    def settle(self) -> None:
        """Replace the reservation by the true usage of the finished request."""
        used = self._count_used_tokens()
        self.tenant.tokens.settle(self, used - self._reserved)
        self._reserved = used


class Tenants:
    """All tenants of the current key file.

    Args:
        path: the key file; None: all clients are one tenant without name and limits.
        clock: returns the time, s.

    Raises:
        KeysError: the file is invalid at the start. Later, the last valid content stays live.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._anyone = Tenant(clock=clock)
        self._tenants: dict[str, Tenant] = {}
        self._owners: dict[str, str] = {}
        self._seen: object = None
        self._remote_usage: dict[str, tuple[float, Usage]] = {}  # replica -> time and content of its report
        if path is not None:
            self._seen = _stamp(path)
            self._apply_keys(read_keys(path))

    def find(self, authorization: str) -> Tenant:
        """Return the tenant for an Authorization header; raise RequestRefusedError (401) for unknown keys."""
        if self._path is None:
            return self._anyone
        key = bearer_key(authorization)
        owner = None if key is None else self._owners.get(digest(key))
        if owner is None:
            raise RequestRefusedError(
                "the key is missing or wrong: send Authorization: Bearer KEY", status=401
            )
        return self._tenants[owner]

    async def watch(self) -> None:
        """Apply changes of the file, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_RELOAD_PERIOD_S)
            keys = await asyncio.to_thread(self.read_changed_keys)
            if keys is not None:
                self._apply_keys(keys)

    async def share_usage(self, exchange: Callable[[Usage], Awaitable[dict[str, Usage]]]) -> None:
        """Share usage with the other ingress replicas, until cancelled.

        Args:
            exchange: sends this replica's usage, and returns the usage of each other replica; raises
                ConnectionError if it cannot.
        """
        while self._path is not None:
            await asyncio.sleep(_SHARE_PERIOD_S)
            try:
                self.add_remote_usage(await exchange(self.local_usage()))
            except ConnectionError:  # each replica counts alone until the router is back
                continue

    def local_usage(self) -> Usage:
        """Return the usage by this replica's requests, also of tenants that have no limit now."""
        return {
            name: (tenant.requests.charged, tenant.tokens.charged) for name, tenant in self._tenants.items()
        }

    def add_remote_usage(self, usage: dict[str, Usage]) -> None:
        """Count the usage at other replicas since each one's first report of the tenant.

        After an outage of up to `_MAX_OUTAGE_S`, this includes the usage during the outage.
        """
        now_s = self._clock()
        self._remote_usage = {
            name: report for name, report in self._remote_usage.items() if now_s - report[0] <= _MAX_OUTAGE_S
        }
        for replica, tenants in usage.items():
            _, before = self._remote_usage.get(replica, (now_s, {}))
            for name, charged in tenants.items():
                if tenant := self._tenants.get(name):
                    last_charged = before.get(name, charged)
                    tenant.requests.add_usage(charged[0] - last_charged[0])
                    tenant.tokens.add_usage(charged[1] - last_charged[1])
            self._remote_usage[replica] = now_s, tenants

    def read_changed_keys(self) -> Keys | None:
        """Return the keys if the file has changed. An invalid file is logged once and counts as unchanged."""
        if self._path is None or (stamp := _stamp(self._path)) == self._seen:
            return None
        self._seen = stamp
        try:
            keys = read_keys(self._path)
        except KeysError as error:
            logger.error("the previous keys stay live: %s", error)
            return None
        # A warning, since deployments hide lower levels.
        logger.warning("read %d keys of %d tenants: %s", len(keys.keys), len(keys.tenants), self._path)
        return keys

    def _apply_keys(self, keys: Keys) -> None:
        tenants = {}
        for name, limits in keys.tenants.items():
            if tenant := self._tenants.get(name):
                tenant.set_limits(limits)
            tenants[name] = tenant or Tenant(name, limits, self._clock)
        self._tenants = tenants
        self._owners = keys.owners


class SharedLimits:
    """Usage by ingress replica, held by the router; a replica silent for a minute is removed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, tuple[float, Usage]] = {}

    def exchange(self, ingress: str, usage: Usage) -> dict[str, Usage]:
        """Store one replica's usage since its start; return the usage of the other replicas."""
        now_s = self._clock()
        self._usage[ingress] = (now_s, usage)
        self._usage = {name: item for name, item in self._usage.items() if now_s - item[0] <= _SILENT_S}
        return {name: item[1] for name, item in self._usage.items() if name != ingress}


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
