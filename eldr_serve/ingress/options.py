"""Options of an ingress replica, as in the deployment YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import AnyHttpUrl, BaseModel, Field, field_validator, model_validator

_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


class TracingOptions(BaseModel, frozen=True, extra="forbid"):
    """OpenTelemetry tracing of requests."""

    endpoint: AnyHttpUrl = Field(
        description="URL of a collector that accepts OTLP over HTTP, such as http://collector:4318/v1/traces"
    )
    sample: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of requests that are traced; if a request has a `traceparent` header, its "
        "sampled flag decides",
    )


class IngressOptions(BaseModel, frozen=True, extra="forbid"):
    """Options of one ingress replica."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of each ingress replica's own HTTP server, which bypasses Serve's proxy; replicas "
        "of one node share it; null: only Serve's proxy",
    )
    host: str = Field(default="127.0.0.1", description="address of that server; 0.0.0.0: all interfaces")
    max_in_flight: int = Field(
        default=4096, ge=1, description="maximum requests in one ingress replica; more get 429 before prefill"
    )
    max_body_mib: float = Field(
        default=16.0, gt=0, description="maximum size of a request's body, MiB; a larger one gets 413"
    )
    max_pending_mib: float = Field(
        default=1024.0,
        gt=0,
        description="maximum total size of the bodies of requests in one ingress replica, from their arrival "
        "to the end of the answer, MiB; more get 503; at least twice max_body_mib",
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="time for a request's body to arrive, s; a slower one gets 408",
    )
    max_sequences: int = Field(
        default=256, ge=1, description="maximum answers to one request (prompts x n); more get 400"
    )
    keys_file: Path | None = Field(
        default=None,
        description="inference keys, tenants and their limits (`eldr keys`), on each node of the ingress; "
        "read again when it changes; null: no key is required",
    )
    max_wait_s: float = Field(
        default=5.0,
        ge=0,
        description="maximum wait of a tenant's request for admission before it gets 429, s; without "
        "keys_file, no request waits",
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="maximum requests that wait for admission in one ingress replica"
    )
    max_connections: int = Field(
        default=16384, ge=1, description="maximum open connections to one replica's port; more are closed"
    )
    head_timeout_s: float = Field(
        default=30.0, gt=0, description="time for a request's line and headers to arrive at the port, s"
    )
    write_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="a connection to the port is closed if its client accepts no data for this time, s",
    )
    log_requests: Literal["failed", "all"] = Field(
        default="failed",
        description="which requests for generated text get a line of JSON in the log when they end: those "
        "with a failure, even if they were answered, or all",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="origins of the web pages whose scripts may use the service (CORS), such as "
        "https://chat.example.com; '*': all",
    )
    tracing: TracingOptions | None = Field(
        default=None, description="one span per request and per stage of it; null: no tracing"
    )

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: give a scheme, a host and perhaps a port, such as "
                    "https://chat.example.com, or '*' for all"
                )
        return origins

    @model_validator(mode="after")
    def _require_room_for_one_body(self) -> IngressOptions:
        if self.max_pending_mib < 2 * self.max_body_mib:
            raise ValueError(
                f"max_pending_mib must be at least twice max_body_mib ({self.max_body_mib:g}), got "
                f"{self.max_pending_mib:g}: a compressed body also counts as decompressed"
            )
        return self
