"""The endpoints of an ingress for operators and probes: status, settings, tables, traces, health."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eldr_serve.channel.actors import AWAY
from eldr_serve.errors import BadRequest, Overloaded, SwapRefused, sentence
from eldr_serve.ingress.admission import Gate
from eldr_serve.ingress.body import parse_json
from eldr_serve.pipeline.engines import Engines
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.pipeline.warmup import Warmup
from eldr_serve.replicas.expert_swap import place_everywhere
from eldr_serve.router.client import RouterClient
from eldr_serve.router.loop_watch import LoopWatch
from eldr_serve.router.messages import NamedPolicy, Settings
from eldr_serve.signatures.control import PoolControl

_METRICS_ABOUT = (
    b"# One ingress process. Requests, router, workers and engines: Ray's metrics port of each node "
    b"(docs/watching.md).\n"
)


class PolicyChange(BaseModel):
    """Body of PUT /eldr/policy."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="name of the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="its parameters")


class AdminEndpoints:
    """Answers operators, load balancers and monitoring.

    Args:
        pool: the application's signature pool.
        watch: watches the event loop of this process.
        model_id: name of the served model.
        engine_version: version that `GET /version` returns.
    """

    def __init__(
        self,
        *,
        gate: Gate,
        client: RouterClient,
        engines: Engines,
        path: RequestPath,
        warmup: Warmup,
        tokens: PromptTokens,
        pool: PoolControl,
        watch: LoopWatch,
        model_id: str,
        engine_version: str,
    ) -> None:
        self._gate, self._client, self._engines, self._path = gate, client, engines, path
        self._warmup, self._tokens, self._pool, self._watch = warmup, tokens, pool, watch
        self._model_id, self._engine_version = model_id, engine_version

    async def status(self, request: Request) -> Response:
        """Return workers, load, policy, table and counters of the router, and this ingress's own part.

        Without the admin key, return only readiness and size of the service.
        """
        if not self._gate.is_operator(request.headers):
            return JSONResponse(self._public_summary())
        return await self._merged("status")

    async def ready(self, request: Request) -> Response:
        """Return 200 if the service is ready for requests, else 503 with one sentence, for readiness probes.

        It becomes ready when all prefill-decode pairs, or all whole engines, are warm, and stays so while any
        decode engine that has been warm is up.
        """
        if (awaited := self._warmup.awaited) is not None:
            raise Overloaded(awaited)
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
        self._gate.check_key(request.headers)
        return await self._merged("live")

    async def _merged(self, method: str) -> Response:
        """Return the router's answer to `method`, with this ingress's own status."""
        try:
            status = await self._client.call(method)
        except AWAY as error:
            status = {"router": f"away ({type(error).__name__})"}
        loops = status.get("loops", {}) | {self._watch.role: self._watch.status()}
        own = {"answered_by": self._client.name, "ingress": self.summary(), "loops": loops}
        return JSONResponse(status | own)

    def summary(self) -> dict[str, Any]:
        """Return the status of this ingress as JSON-able values."""
        return {
            "in_flight": self._gate.in_flight,
            "waiting": self._gate.limiter.waiting,
            "leases": self._client.lease_count,
            "router_away": self._client.router_away,
            "warm_pairs": self._warmup.pairs,
            "ready": self._warmup.ready,
            "prefill_in_flight": self._engines.prefill.in_flight,
            "prefill_oldest_s": self._engines.prefill.oldest_s,
            "stages": self._path.stage_latencies.summary(),
            "prefill_wait_s": self._path.prefill.waits_s,
            "prefill_kv_usage": self._engines.prefill.directory.budget.usage,
            "decode_kv_usage": self._engines.decode.directory.budget.usage,
            "experts": self._engines.decode.directory.experts,
        }

    def _public_summary(self) -> dict[str, Any]:
        settings = self._client.settings
        return {
            "model": self._model_id,
            "policy": settings.policy if settings else None,
            "prefill_replicas": len(self._engines.prefill.live),
            "decode_replicas": len(self._engines.decode.live),
            "ingress": {
                "ready": self._warmup.ready,
                "router_away": self._client.router_away,
                "in_flight": self._gate.in_flight,
                "leases": self._client.lease_count,
            },
            "details": "with Authorization: Bearer ADMIN_KEY",
        }

    async def set_policy(self, request: Request) -> Response:
        """Change the policy for every ingress at once."""
        change = await _policy_change(request)
        return await self._administer("set_policy", change.name, change.parameters)

    async def set_shadow(self, request: Request) -> Response:
        """Start a shadow comparison of the live policy with another one; DELETE ends it."""
        if request.method == "DELETE":
            return await self._administer("set_shadow", None)
        change = await _policy_change(request)
        return await self._administer("set_shadow", NamedPolicy(change.name, change.parameters))

    async def table(self, request: Request) -> Response:
        """Return the live routing table as a RoutingTable file; PUT swaps in the file of its body."""
        if request.method == "PUT":
            return await self._administer("swap_table", await request.body())
        self._gate.check_key(request.headers)
        settings: Settings = await self._client.call("settings")
        if settings.table is None:
            raise BadRequest(
                "no routing table is live: `signatures` in GET /eldr/status shows what is missing"
            )
        return Response(settings.table, media_type="application/octet-stream")

    async def swap_predictor(self, request: Request) -> Response:
        """Swap the signature predictor; the body is a SignaturePredictor file."""
        try:
            tokenizer = self._client.scorer.tokenizer = await self._tokens.fingerprint()
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return await self._administer("swap_predictor", await request.body(), tokenizer)

    async def refit(self, request: Request) -> Response:
        """Fit a routing table to recent traffic and swap it in. The body is ignored."""
        try:
            return JSONResponse({"table": await self._pool.refit()})
        except SwapRefused as error:
            raise BadRequest(str(error)) from error

    async def trace(self, request: Request) -> Response:
        """Return the signature pool's samples as a CalibrationTrace file, which holds prompts' token ids."""
        self._gate.check_key(request.headers)
        try:
            tokenizer, vocabulary = await self._tokens.fingerprint(), await self._tokens.size()
        except ValueError:  # a trace without token ids needs no tokenizer
            tokenizer, vocabulary = "", 0
        try:
            file = await self._pool.trace(tokenizer, vocabulary)
        except SwapRefused as error:
            raise BadRequest(str(error)) from error
        return Response(file, media_type="application/octet-stream")

    async def place_experts(self, request: Request) -> Response:
        """Apply an expert placement to the decode engines while they serve, one engine after the other."""
        return JSONResponse(await place_everywhere(self._engines.decode, await request.body()))

    async def _administer(self, method: str, *args: Any) -> Response:
        try:
            settings = await self._client.call(method, *args)
        except SwapRefused as error:
            raise BadRequest(str(error)) from error
        except AWAY as error:
            raise Overloaded(f"the DecodeRouter does not answer ({type(error).__name__})") from error
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


async def _policy_change(request: Request) -> PolicyChange:
    """Return the policy in a request's body; raise BadRequest if it is invalid."""
    try:
        return PolicyChange.model_validate(parse_json(await request.body()))
    except ValidationError as error:
        raise BadRequest(sentence(error)) from error
