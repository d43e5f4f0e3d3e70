"""The keys file: tenants, their limits, and the hashes of their inference keys, not the keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eldr_serve.errors import UserInputError, one_line_message
from eldr_serve.files import write_atomically
from eldr_serve.objective import MAX_MS, Objective

TenantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeysError(UserInputError):
    """The keys file is unreadable or invalid; one sentence."""


class Limits(BaseModel):
    """Limits of one tenant, shared by all its keys, and the default objective of its requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    priority: float = Field(
        default=1.0, gt=0, le=1000, description="weight of the tenant's fair share while requests wait"
    )
    requests_per_minute: float | None = Field(default=None, gt=0, description="null: no limit")
    tokens_per_minute: float | None = Field(
        default=None, gt=0, description="prompt and generated tokens; null: no limit"
    )
    ttft_ms: float | None = Field(
        default=None, gt=0, le=MAX_MS, description="objective of requests without the header x-eldr-ttft-ms"
    )
    tpot_ms: float | None = Field(
        default=None, gt=0, le=MAX_MS, description="objective of requests without the header x-eldr-tpot-ms"
    )

    @property
    def objective(self) -> Objective:
        """Return the latencies that the tenant's requests should have by default."""
        return Objective(
            None if self.ttft_ms is None else self.ttft_ms / 1000,
            None if self.tpot_ms is None else self.tpot_ms / 1000,
        )


class Key(BaseModel):
    """One key of a tenant, as its SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Sha256
    tenant: TenantName
    created: date | None = None


class Keys(BaseModel):
    """All tenants and keys of a service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenants: dict[TenantName, Limits] = Field(default_factory=dict)
    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Keys:
        for key in self.keys:
            if key.tenant not in self.tenants:
                raise ValueError(f"key {key.sha256[:12]} belongs to {key.tenant!r}, which is not in tenants")
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("a key is listed twice")
        return self

    @property
    def owners(self) -> dict[str, str]:
        """Return the tenant of each key, by the key's SHA-256."""
        return {key.sha256: key.tenant for key in self.keys}


def digest(key: str) -> str:
    """Return the SHA-256 of a key, hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer_key(authorization: str) -> str | None:
    """Return the key of an Authorization header; None unless its scheme is Bearer, in any case."""
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" else None


def read_keys(path: Path) -> Keys:
    """Read the keys file; raise KeysError if it is missing or invalid."""
    try:
        return Keys.model_validate_json(path.read_bytes())
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise KeysError(f"{path}: {one_line_message(error)}") from error


def write_keys(path: Path, keys: Keys) -> None:
    """Write the keys file atomically."""
    write_atomically(path, keys.model_dump_json(indent=1, exclude_none=True) + "\n")


def add_key(keys: Keys, tenant: str, key: str, limits: Mapping[str, float]) -> Keys:
    """Return the keys with one more key of the tenant and its new limits; raise KeysError if invalid."""
    old = keys.tenants[tenant].model_dump() if tenant in keys.tenants else {}
    try:
        tenants = {**keys.tenants, tenant: Limits(**{**old, **limits})}
        new_key = Key(sha256=digest(key), tenant=tenant, created=datetime.now(UTC).date())
        return Keys(tenants=tenants, keys=(*keys.keys, new_key))
    except ValidationError as error:
        raise KeysError(one_line_message(error)) from error


def revoke_key(keys: Keys, prefix: str) -> Keys:
    """Return the keys without the one whose SHA-256 has this prefix; raise KeysError unless it is unique."""
    matches = [key for key in keys.keys if prefix and key.sha256.startswith(prefix)]
    if len(matches) != 1:
        raise KeysError(
            f"prefix {prefix!r} matches {len(matches)} keys: give one that matches exactly one key"
        )
    return Keys(tenants=keys.tenants, keys=tuple(key for key in keys.keys if key is not matches[0]))
