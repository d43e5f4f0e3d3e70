"""The ingress deployment: the HTTP endpoints of the service and their background work.

The ingress parses no more of a request than placement needs: engines validate requests, and answers pass as
bytes. It imports neither vLLM nor Ray Serve LLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from eldr_serve.serving.admin_endpoints import AdminEndpoints
from eldr_serve.serving.admission import (
    Gate,
    IngressOptions,
    TracingOptions,
)
from eldr_serve.serving.autoscaling import IN_FLIGHT
from eldr_serve.serving.decode_router import actor_name, connect
from eldr_serve.serving.fleet import Fleet
from eldr_serve.serving.http_application import application as http_application
from eldr_serve.serving.http_server import HttpServer
from eldr_serve.serving.loop_watch import LoopWatch
from eldr_serve.serving.openai_endpoints import OpenAIEndpoints
from eldr_serve.serving.path import RequestPath
from eldr_serve.serving.path_options import PathOptions
from eldr_serve.serving.port import Port, owner_of_port
from eldr_serve.serving.prompt_tokens import PromptTokens
from eldr_serve.serving.replicas import directory
from eldr_serve.serving.request_log import RequestLog
from eldr_serve.serving.request_run import Engines
from eldr_serve.serving.router_calls import AWAY, RouterCalls
from eldr_serve.serving.router_client import RouterClient
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.signatures.control import PoolControl
from eldr_serve.serving.warmup import Warmup
from eldr_serve.serving.watching import PERIOD_S, IngressMetrics

if TYPE_CHECKING:
    from eldr_serve.serving.tracing import Tracing

logger = logging.getLogger(__name__)

_ALONE_S, _LOOK_S = 5.0, 0.05  # until it listens without a decode replica


class EldrIngress:
    """An ingress replica.

    Attributes:
        gate: admits requests.
        openai, admin: the endpoints, by which http_application finds them.

    Args:
        prefill, decode: handles of the deployments, used only for their health and to discover their
            replicas. Without `prefill`, decode engines prefill as well.
        tokenizer: location of the model's tokenizer, a folder or a name on the hub.
        model_card: description of the model in `GET /v1/models`.
        openapi: the OpenAPI document.
        application: name of the application, part of the name of the DecodeRouter actor.
        router: start arguments of that actor.
        max_load_ratio: a prefill replica whose load exceeds the mean by this factor is skipped.
        max_kv_usage: a prefill replica with more than this share of its KV blocks in use gets no prompts.
        admin_key_sha256: SHA-256 (hex) of the key for PUT /eldr/*; if None, all of these are refused.
        engine_version: version that `GET /version` returns.

    Raises:
        PortTaken: another application or program has the port of `options`.
    """

    def __init__(
        self,
        *,
        prefill: DeploymentHandle | None,
        decode: DeploymentHandle,
        tokenizer: str,
        model_card: dict[str, Any],
        openapi: dict[str, Any],
        application: str,
        router: RouterSettings,
        options: IngressOptions,
        path_options: PathOptions,
        max_load_ratio: float = 1.25,
        max_kv_usage: float = 0.95,
        admin_key_sha256: str | None = None,
        engine_version: str = "",
    ) -> None:
        self._prefill = Fleet(directory(prefill_directory(application)))
        self._prefill.directory.budget.max_usage = max_kv_usage
        self._decode = Fleet(directory(decode_directory(application)))
        calls = RouterCalls(lambda: connect(actor_name(application), router))
        self._client = RouterClient(calls, self._decode, on_predictor=self._tokenise)
        self.gate = Gate(options, admin_key_sha256, self._client.count)
        self._router = router
        engines = Engines(self._prefill, self._decode, max_load_ratio, whole=prefill is None)
        self._tokens = PromptTokens(tokenizer)
        self._whole = engines.whole
        self._tokenising: asyncio.Task[None] | None = None
        self._path = RequestPath(
            engines=engines, client=self._client, options=path_options, tokens=self._tokens
        )
        self._log = RequestLog(every=options.log_requests == "all", tracing=_tracing(options.tracing))
        handles = [handle for handle in (prefill, decode) if handle is not None]
        self._warmup = Warmup(engines=engines, handles=handles, client=self._client, model_id=router.model_id)
        self._watch = LoopWatch("ingress")
        self.openai = OpenAIEndpoints(
            path=self._path,
            client=self._client,
            decode=self._decode,
            log=self._log,
            max_sequences=options.max_sequences,
            model_card=model_card,
            openapi=openapi,
        )
        self.admin = AdminEndpoints(
            gate=self.gate,
            client=self._client,
            engines=engines,
            path=self._path,
            warmup=self._warmup,
            tokens=self._tokens,
            pool=PoolControl(application),
            watch=self._watch,
            model_id=router.model_id,
            engine_version=engine_version,
        )
        self._started: asyncio.Task[None] | None = None
        self._http: HttpServer | None = None
        self._port: Port | None = None
        if options.port is not None:
            self._port = Port(options.host, options.port, owner_of_port(application))

    async def check_health(self) -> None:
        """Serve's health check. The first call starts the background work.

        Raise the exception that ended the background work, if any.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        if self._started.done():
            self._started.result()

    async def _start(self) -> None:
        self._prefill.start()
        self._decode.start()
        if self._whole or self._router.predictor is not None:
            self._tokenise()
            assert self._tokenising is not None
            await self._tokenising
        try:
            await self._client.call("configure", self._router)
        except AWAY as error:
            logger.warning("DecodeRouter is not up yet: %r", error)
        self._client.start()
        tenants, name = self.gate.tenants, uuid.uuid4().hex
        await asyncio.gather(
            self._warmup.run(),
            self._listen(),
            self._export(),
            self._watch.run(),
            tenants.watch(),
            tenants.share(lambda taken: self._client.call("share_limits", name, taken)),
        )

    def _tokenise(self) -> None:
        """Load the tokenizer, once: whoever swapped a predictor in may have told another ingress."""
        failed = self._tokenising is not None and self._tokenising.done() and self._client.tokenizer is None
        if self._tokenising is None or failed:
            self._tokenising = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        try:
            self._client.tokenised_by(await self._tokens.fingerprint())
        except ValueError as error:
            logger.warning("prompts are placed without a prediction: %s", error)

    async def _listen(self) -> None:
        """Answer at the port of its own. Where a decode replica is known soon, not before: other ingresses of
        the node have the connections until then."""
        if self._port is None:
            return
        until = time.monotonic() + _ALONE_S
        while not self._decode.live and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        self._http = HttpServer(http_application(), self.gate.options, self._port)

    async def _export(self) -> None:
        metrics = IngressMetrics()
        while True:
            metrics.export(self.admin.summary())
            await asyncio.sleep(PERIOD_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what it cannot count itself, since it does not see what comes in at the own port."""
        return {IN_FLIGHT: float(self.gate.in_flight)}

    async def __del__(self) -> None:
        """Serve's hook before it ends the replica: answers end first."""
        if self._http is not None:
            await self._http.drain()
        elif self._port is not None:
            self._port.release()
        await self._log.stop()

    async def stop(self) -> None:
        """End the background work and all channels."""
        if self._started is not None:
            self._started.cancel()
        if self._tokenising is not None:
            self._tokenising.cancel()
        await self._log.stop()
        await self._client.stop()
        await self._prefill.stop()
        await self._decode.stop()


def _tracing(options: TracingOptions | None) -> Tracing | None:
    if options is None:
        return None
    from eldr_serve.serving.tracing import Tracing  # of OpenTelemetry, which is imported for a while

    return Tracing(options)


def decode_directory(application: str) -> str:
    """Under which this process's decode request router is found."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Under which this process's prefill request router is found."""
    return f"{application}/prefill"
