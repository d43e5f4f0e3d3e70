"""Limits on attempts and waiting times for the steps of a request."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

_LEASE_SHARE = 0.8  # share of a KV lease that a wait for a worker may use; the rest is for the transfer


class PathOptions(BaseModel, frozen=True, extra="forbid"):
    """Limits on attempts and waiting times, and the lifetime of a prompt's KV blocks."""

    prefill_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="how long a request waits while every prefill replica's KV cache is full, or no decode "
        "replica can be reached, before it gets 503, s",
    )
    prefill_queue_s: float = Field(
        default=30.0,
        gt=0,
        description="prompts that may wait in a replica for their prefill, in predicted time, s; a request "
        "for which no replica has room gets 503 at once, with the time when there is room as Retry-After",
    )
    prefill_tries: int = Field(
        default=3, ge=1, description="prefill calls of one request that may fail, in all, before it gets 503"
    )
    decode_tries: int = Field(
        default=3,
        ge=1,
        description="decode calls of one request before its first token; each is of a prefill of its own",
    )
    retries_at_once: int = Field(
        default=64,
        ge=1,
        description="requests that one ingress has prefilled and placed again at once, after an engine has "
        "failed them or was lost; more wait",
    )
    retry_wait_s: float = Field(
        default=10.0, ge=0, description="how long such a request waits for its turn before it is given up, s"
    )
    prefill_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="a prefill call that takes longer, after its predicted end and after the replica has "
        "answered those before it, has failed, s",
    )
    first_token_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="so has a decode call without a token for longer; the time in which calls before it "
        "begin, or the replica has more calls than seats and answers them, does not count, s",
    )
    gap_limit_s: float = Field(
        default=15.0, gt=0, description="so has one without a further token for longer, s"
    )
    stall_limit_s: float = Field(
        default=10.0,
        gt=0,
        description="an engine whose core finishes no step for longer, though it has calls, is taken as lost "
        "until it does, s; more than the longest step takes, a compilation in it included. Before its first "
        "answer to a client there is no limit",
    )
    whole_per_s: float = Field(
        default=8.0,
        ge=0,
        description="requests a second that one ingress sends whole to decode engines while it reaches no "
        "prefill replica; more wait as for a full KV cache",
    )
    retry_backoff_s: float = Field(
        default=0.05, ge=0, description="mean wait before the first retry, s; then doubled"
    )
    kv_lease_s: float = Field(
        default=30.0, gt=0, description="how long a prefill engine keeps a finished prompt's blocks, s"
    )
    queue_ttl_s: float = Field(
        default=10.0,
        gt=0,
        description="how long a prefilled request may wait for a worker in the decode queue before "
        "it gets 503, s; less than 0.8 of kv_lease_s",
    )

    @model_validator(mode="after")
    def _queue_within_lease(self) -> PathOptions:
        if self.queue_ttl_s >= _LEASE_SHARE * self.kv_lease_s:
            raise ValueError(
                f"queue_ttl_s is {self.queue_ttl_s:g} s, it must be less than {_LEASE_SHARE:g} of kv_lease_s "
                f"({self.kv_lease_s:g} s): a prompt's blocks must outlive its wait"
            )
        return self
