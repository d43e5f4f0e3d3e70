"""Who sends a request, and what they have left of their limits."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from eldr_serve.errors import RateLimited, Refused
from eldr_serve.routing import Placement
from eldr_serve.serving.keys import Keys, KeysError, Limits, digest, read_keys
from eldr_serve.serving.router_calls import AWAY

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = _SHARE_PERIOD_S = 1.0
Taken = dict[str, tuple[float, float]]  # of tenants with limits: requests and tokens, since the process began
_MINUTE_S = 60.0


class Bucket:
    """So many units a minute; those of one minute, and at least one, may be saved up.

    What a request turns out to use is taken though it be more than is left: the debt is paid off first. So
    over any t seconds at most `per_minute * (1 + t / 60)` units and the last taker's are taken.

    Args:
        per_minute: None: no limit.
        clock: s.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self.taken = 0.0  # in all, by this process
        self._clock = clock
        self._used, self._at = 0.0, clock()

    def limit(self, per_minute: float | None) -> None:
        """Change the limit; what has been used stays used."""
        self._pay_off()
        self.per_minute = per_minute

    def wait_s(self) -> float:
        """Until one unit is left; 0 if it is."""
        if self.per_minute is None:
            return 0.0
        self._pay_off()
        missing = self._used + 1.0 - max(self.per_minute, 1.0)
        return max(missing, 0.0) * _MINUTE_S / self.per_minute

    def take(self, units: float) -> None:
        """Whatever is left; negative units are given back."""
        self.taken += units
        self.use(units)

    def use(self, units: float) -> None:
        """The same, of units that another process has taken."""
        self._pay_off()
        self._used = max(self._used + units, 0.0)

    def _pay_off(self) -> None:
        now = self._clock()
        if self.per_minute is None:
            self._used = 0.0
        else:
            self._used = max(self._used - (now - self._at) * self.per_minute / _MINUTE_S, 0.0)
        self._at = now


class Tenant:
    """One tenant of this ingress replica. The nameless one is everybody, where no keys are asked for."""

    def __init__(
        self, name: str = "", limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        limits = limits or Limits()
        self.priority = limits.priority
        self.requests = Bucket(limits.requests_per_minute, clock)
        self.tokens = Bucket(limits.tokens_per_minute, clock)

    def change(self, limits: Limits) -> None:
        """Of now on."""
        self.priority = limits.priority
        self.requests.limit(limits.requests_per_minute)
        self.tokens.limit(limits.tokens_per_minute)

    @property
    def limited(self) -> bool:
        """Whether there is anything to count."""
        return (self.requests.per_minute, self.tokens.per_minute) != (None, None)

    def admit(self) -> None:
        """Count one request; RateLimited if there are too many."""
        self.check(self.requests, "requests")
        self.requests.take(1.0)

    def check(self, bucket: Bucket, what: str) -> None:
        """RateLimited if nothing is left."""
        wait_s = bucket.wait_s()
        if wait_s:
            raise RateLimited(
                f"tenant {self.name!r} has used up its {bucket.per_minute:g} {what} a minute",
                retry_after_s=math.ceil(wait_s),
            )


class Visit:
    """One request of a tenant, and the tokens that it takes of the tenant's limit.

    Attributes:
        lease: its newest; it knows what was really used.
    """

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.lease: Placement | None = None
        self._prompt = self._taken = 0

    def foresee(self, prompt: int, output: int) -> None:
        """Take these tokens until more is known; RateLimited while nothing is left."""
        self.tenant.check(self.tenant.tokens, "tokens")
        self._prompt, self._taken = prompt, prompt + output
        self.tenant.tokens.take(self._taken)

    def settle(self) -> None:
        """The request has ended: what it used takes the place of what was foreseen."""
        used = 0
        if self.lease is not None:
            used = (self.lease.request.prompt_tokens or self._prompt) + self.lease.generated_tokens
        self.tenant.tokens.take(used - self._taken)
        self._taken = used


class Tenants:
    """All tenants, as the file of keys says now.

    Args:
        path: None: whoever comes is the nameless tenant, without limits.
        clock: s.

    Raises:
        KeysError: the file cannot be used. Later, what was live before stays so.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._anyone = Tenant(clock=clock)
        self._tenants: dict[str, Tenant] = {}
        self._owners: dict[str, str] = {}
        self._seen: object = None
        self._elsewhere: dict[str, Taken] = {}
        if path is not None:
            self._seen = _stamp(path)
            self._take(read_keys(path))

    def find(self, authorization: str) -> Tenant:
        """Of a request with this Authorization header; Refused (401) if the key is nobody's."""
        if self._path is None:
            return self._anyone
        scheme, _, key = authorization.partition(" ")
        owner = self._owners.get(digest(key)) if scheme.lower() == "bearer" else None
        if owner is None:
            raise Refused("the key is missing or wrong: send Authorization: Bearer KEY", status=401)
        return self._tenants[owner]

    async def watch(self) -> None:
        """Take changes of the file as they are made, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_LOOK_PERIOD_S)
            changed = await asyncio.to_thread(self.look)
            if changed is not None:
                self._take(changed)

    async def share(self, exchange: Callable[[Taken], Awaitable[dict[str, Taken]]]) -> None:
        """Count together with the other ingress replicas, until cancelled.

        Args:
            exchange: tells what tenants have taken here, and returns the same of each other replica.
        """
        while self._path is not None:
            await asyncio.sleep(_SHARE_PERIOD_S)
            try:
                self.use(await exchange(self.taken()))
            except AWAY:  # each replica counts by itself until the router is back
                continue

    def taken(self) -> Taken:
        """By this replica's requests."""
        limited = (tenant for tenant in self._tenants.values() if tenant.limited)
        return {tenant.name: (tenant.requests.taken, tenant.tokens.taken) for tenant in limited}

    def use(self, elsewhere: dict[str, Taken]) -> None:
        """Other replicas have taken so much; of one that is new here, what it takes from now on counts."""
        for replica, tenants in elsewhere.items():
            before = self._elsewhere.get(replica, tenants)
            for name, taken in tenants.items():
                if tenant := self._tenants.get(name):
                    known = before.get(name, (0.0, 0.0))
                    tenant.requests.use(taken[0] - known[0])
                    tenant.tokens.use(taken[1] - known[1])
        self._elsewhere = elsewhere

    def look(self) -> Keys | None:
        """What the file says if it has changed; a bad one is logged once, and counts as unchanged."""
        if self._path is None or (stamp := _stamp(self._path)) == self._seen:
            return None
        self._seen = stamp
        try:
            keys = read_keys(self._path)
        except KeysError as error:
            logger.error("the keys of before stay live: %s", error)
            return None
        logger.warning("%s: %d keys of %d tenants", self._path, len(keys.keys), len(keys.tenants))
        return keys

    def _take(self, keys: Keys) -> None:
        tenants = {}
        for name, limits in keys.tenants.items():
            if known := self._tenants.get(name):
                known.change(limits)
            tenants[name] = known or Tenant(name, limits, self._clock)
        self._tenants, self._owners = tenants, keys.owners


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
