"""The endpoints of an ingress for operators and probes: status, settings, tables, traces, health."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.channel import CallFailedError, ChannelLostError
from eldr_serve.errors import (
    BadRequestError,
    OverloadedError,
    RequestRefusedError,
    SwapRefusedError,
    one_line_message,
)
from eldr_serve.fleet.drain import LastReplicaError, UnknownReplicaError, drain
from eldr_serve.fleet.expert_swap import place_on_replicas
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.ingress.admission import Gate
from eldr_serve.ingress.body import parse_json
from eldr_serve.ingress.status import IngressStatus
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.router_client.operator_calls import OperatorCalls
from eldr_serve.router_client.scorer import Scorer
from eldr_serve.router_protocol.messages import LiveSettings, NamedPolicy
from eldr_serve.scheduling.worker_names import replica_of
from eldr_serve.signatures.coordinator_client import CoordinatorClient

_METRICS_ABOUT = (
    b"# One ingress process. Requests, router, workers and engines: Ray's metrics port of each node "
    b"(docs/watching.md).\n"
)


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


class Drain(BaseModel):
    """Body of PUT /eldr/drain."""

    model_config = ConfigDict(extra="forbid")

    replica: str = Field(description="decode replica, or one of its workers, as in the status")


class AdminEndpoints:
    """Endpoints for operators, load balancers and monitoring; the HTTP application checks the admin key.

    Args:
        gate: knows whether a request has the admin key.
        operator: calls of the router that read or change the live settings.
        scorer: learns the fingerprint of the served tokenizer, before a predictor is swapped in.
        status: the status of this ingress, and what keeps the service from being ready.
        decode: the decode replicas, which get expert placements and are drained.
        tokenizer: the tokenizer of the served model; predictors and traces contain its fingerprint.
        pool: the application's signature pool.
        engine_version: version that `GET /version` returns.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        operator: OperatorCalls,
        scorer: Scorer,
        status: IngressStatus,
        decode: Fleet,
        tokenizer: PromptTokenizer,
        pool: CoordinatorClient,
        engine_version: str,
    ) -> None:
        self._gate = gate
        self._operator, self._scorer = operator, scorer
        self._status = status
        self._decode = decode
        self._tokenizer = tokenizer
        self._pool = pool
        self._engine_version = engine_version

    async def status(self, request: Request) -> Response:
        """Return workers, load, policy, table and counters of the router, and this ingress's own part.

        Without the admin key, return only readiness and size of the service.
        """
        if not self._gate.is_operator(request.headers):
            return JSONResponse(self._status.public_status())
        return JSONResponse(await self._status.merge_router_status(self._operator.status()))

    async def ready(self, request: Request) -> Response:
        """Return 200 if the service is ready for requests, else 503 with one sentence, for readiness probes.

        The service becomes ready when all prefill-decode pairs, or all whole replicas, are warm, but at the
        latest a minute after the first of them. It stays ready while any decode engine that has been warm is
        up.
        """
        reason = self._status.not_ready_reason
        if reason is not None:
            raise OverloadedError(reason)
        return JSONResponse({"ready": True})

    async def health(self, request: Request) -> Response:
        """Return 200 and an empty body once the service is ready for requests, else 503, like vLLM."""
        await self.ready(request)
        return Response()

    async def version(self, request: Request) -> Response:
        """Return the version of vLLM that the engines run, in vLLM's format."""
        return JSONResponse({"version": self._engine_version})

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics of this process, and the location of all other metrics."""
        return Response(_METRICS_ABOUT + generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def live(self, request: Request) -> Response:
        """Return the status and the history that the live page draws."""
        return JSONResponse(await self._status.merge_router_status(self._operator.live()))

    async def set_policy(self, request: Request) -> Response:
        """Change the policy for every ingress at once."""
        change = await _policy_change(request)
        return await self._administer(self._operator.set_policy(change.name, change.parameters))

    async def set_shadow(self, request: Request) -> Response:
        """Start a shadow comparison of the live policy with another one; DELETE ends it."""
        if request.method == "DELETE":
            return await self._administer(self._operator.set_shadow(None))
        change = await _policy_change(request)
        shadow = NamedPolicy(change.name, change.parameters)
        return await self._administer(self._operator.set_shadow(shadow))

    async def table(self, request: Request) -> Response:
        """Return the live routing table as a RoutingTable file; PUT swaps in the file of its body."""
        if request.method == "PUT":
            return await self._administer(self._operator.swap_table(await request.body()))
        settings = await _from_router(self._operator.settings())
        if settings.table is None:
            raise RequestRefusedError(
                "no routing table is live: `signatures` in GET /eldr/status shows what is missing", status=404
            )
        return Response(settings.table, media_type="application/octet-stream")

    async def swap_predictor(self, request: Request) -> Response:
        """Swap the signature predictor; the body is a SignaturePredictor file."""
        try:
            fingerprint = await self._tokenizer.fingerprint()
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        self._scorer.set_tokenizer(fingerprint)
        return await self._administer(self._operator.swap_predictor(await request.body(), fingerprint))

    async def refit(self, request: Request) -> Response:
        """Fit a routing table to recent traffic and swap it in. The body is ignored."""
        try:
            return JSONResponse({"table": await self._pool.refit()})
        except SwapRefusedError as error:
            raise BadRequestError(str(error)) from error

    async def trace(self, request: Request) -> Response:
        """Return the signature pool's samples as a CalibrationTrace file, which holds prompts' token ids."""
        try:
            tokenizer, vocabulary = await self._tokenizer.fingerprint(), await self._tokenizer.size()
        except ValueError:  # a trace without token ids needs no tokenizer
            tokenizer, vocabulary = "", 0
        try:
            file = await self._pool.trace(tokenizer, vocabulary)
        except SwapRefusedError as error:
            raise BadRequestError(str(error)) from error
        return Response(file, media_type="application/octet-stream")

    async def place_experts(self, request: Request) -> Response:
        """Apply an expert placement to the decode engines while they serve, one engine after the other."""
        return JSONResponse(await place_on_replicas(self._decode, await request.body()))

    async def drain(self, request: Request) -> Response:
        """Move the answers of a decode replica to other replicas, and send it no further requests."""
        try:
            name = replica_of(Drain.model_validate_json(await request.body()).replica)
        except ValidationError as error:
            raise BadRequestError(one_line_message(error)) from error
        try:
            in_flight = await drain(self._decode, name)
        except UnknownReplicaError as error:
            raise BadRequestError(str(error)) from error
        except LastReplicaError as error:
            raise RequestRefusedError(str(error), status=409) from error
        except CallFailedError as error:
            raise RequestRefusedError(f"decode replica {name}: {error}", status=error.status) from error
        except ChannelLostError as error:
            reason = f"decode replica {name} was lost: {one_line_message(error)}"
            raise RequestRefusedError(reason, status=503) from error
        return JSONResponse({"replica": name, "in_flight": in_flight})

    async def _administer(self, change: Awaitable[LiveSettings]) -> Response:
        try:
            settings = await _from_router(change)
        except SwapRefusedError as error:
            raise BadRequestError(str(error)) from error
        return JSONResponse(
            {
                "policy": settings.policy,
                "parameters": settings.parameters,
                "shadow": settings.shadow and asdict(settings.shadow),
                "settings_version": settings.version,
                "table_version": settings.table_version,
                "predictor_version": settings.predictor_version,
            }
        )


async def _from_router(call: Awaitable[LiveSettings]) -> LiveSettings:
    try:
        return await call
    except ACTOR_UNAVAILABLE as error:
        raise OverloadedError(f"the DecodeRouter does not answer ({type(error).__name__})") from error


async def _policy_change(request: Request) -> PolicyChange:
    """Return the policy in a request's body; raise BadRequestError if it is invalid."""
    try:
        return PolicyChange.model_validate(parse_json(await request.body()))
    except ValidationError as error:
        raise BadRequestError(one_line_message(error)) from error
