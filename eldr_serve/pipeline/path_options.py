"""The sections `path` and `prefill_router` of a deployment YAML."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

_LEASE_SHARE = 0.8  # share of a KV lease that a wait for a worker may use; the rest is for the transfer


class PrefillRouterOptions(BaseModel, frozen=True, extra="forbid"):
    """Prefix-hash routing of prompts to prefill replicas."""

    max_load_ratio: float = Field(
        default=1.25,
        ge=1.0,
        description="a replica is skipped if its load, which is the calls of all ingresses, exceeds the mean "
        "by this factor",
    )
    max_kv_usage: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="a replica with more than this share of its KV blocks in use gets no new prompt; 1, or "
        "`disable_log_stats`: no bound",
    )


class PathOptions(BaseModel, frozen=True, extra="forbid"):
    """Limits on attempts and waiting times, and the lifetime of a prompt's KV blocks."""

    replica_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="maximum wait for a prefill replica that can be reached and has room in its KV cache, "
        "and for a decode replica that can be reached; then a request gets 503, s",
    )
    prefill_queue_s: float = Field(
        default=30.0,
        gt=0,
        description="maximum predicted wait for prefill in a replica, s; a request for which no replica has "
        "room gets 503 at once, with the predicted time until there is room as Retry-After",
    )
    slot_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="maximum predicted wait for a slot in a decode engine, which has `max_num_seqs`, s; a "
        "request for which no engine has one in time gets 503 at once, before its prefill, with Retry-After",
    )
    prefill_attempts: int = Field(
        default=3, ge=1, description="failed prefill calls of one request after which it gets 503"
    )
    decode_attempts: int = Field(
        default=3,
        ge=1,
        description="failed decode calls of one request after which it gets 503; a call that fails in "
        "mid-stream does not count",
    )
    max_lost_engines: int = Field(
        default=3,
        ge=1,
        description="engines that die while they work on one request after which it gets 500 and is not "
        "tried again, since the request itself may be the cause",
    )
    retries_at_once: int = Field(
        default=64,
        ge=1,
        description="maximum requests of one ingress that are retried at the same time, after their engine "
        "failed or was lost; more wait",
    )
    retry_wait_s: float = Field(
        default=10.0, ge=0, description="maximum wait of a failed request for its retry, s"
    )
    moves_at_once: int = Field(
        default=16,
        ge=0,
        description="maximum answers of one ingress that move at the same time from decode engines that are "
        "drained, updated or scaled down; others continue on their engines until they can move or end; 0: "
        "none moves",
    )
    prefill_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="time limit of a prefill call, s. It begins when the prompt should have been computed, "
        "or with the replica's last answer to an earlier call if that is later",
    )
    first_token_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="time limit for the first token of a decode call, s. It begins when the prompt should "
        "have been computed, or with the replica's last answer to an earlier call if that is later. Time in "
        "which answers with tokens fill the replica's slots does not count. An answer without generated "
        "tokens, such as embeddings, has the same limit",
    )
    next_token_timeout_s: float = Field(
        default=15.0, gt=0, description="time limit for each further token of a decode call, s"
    )
    stall_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="an engine with calls that finishes no step for longer than this counts as lost until it "
        "does, s; must exceed the longest step, including a compilation. There is no limit before its first "
        "answer to a client",
    )
    prefilled_by_decode_per_s: float = Field(
        default=8.0,
        ge=0,
        description="maximum rate of one ingress's requests that are prefilled by decode engines while no "
        "prefill replica can be reached, requests/s; further requests wait as for a full KV cache",
    )
    local_prefill_tokens: int = Field(
        default=0,
        ge=0,
        description="longest prompt, in tokens, that a decode engine computes beside prefill engines if that "
        "is predicted to be sooner; 0: none",
    )
    retry_backoff_s: float = Field(
        default=0.05, ge=0, description="mean backoff before the first retry, s; doubled for each further one"
    )
    kv_lease_s: int = Field(
        default=30, ge=1, description="how long a prefill engine keeps a finished prompt's blocks, s"
    )
    queue_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="maximum wait of a prefilled request for a worker in the decode queue before it gets "
        "503, s; less than 0.8 of kv_lease_s",
    )

    @model_validator(mode="after")
    def _require_queue_within_lease(self) -> PathOptions:
        if self.queue_timeout_s >= _LEASE_SHARE * self.kv_lease_s:
            raise ValueError(
                f"queue_timeout_s must be less than {_LEASE_SHARE:g} of kv_lease_s ({self.kv_lease_s} s), "
                f"got {self.queue_timeout_s:g} s: a prompt's blocks must outlive its wait"
            )
        return self
