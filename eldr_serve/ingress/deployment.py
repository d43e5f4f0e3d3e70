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

from eldr_serve.channel.actors import AWAY
from eldr_serve.ingress.admin_endpoints import AdminEndpoints
from eldr_serve.ingress.admission import Gate
from eldr_serve.ingress.http_application import application as http_application
from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.openai_endpoints import OpenAIEndpoints
from eldr_serve.ingress.options import IngressOptions, TracingOptions
from eldr_serve.ingress.port import Port, owner_of_port
from eldr_serve.ingress.request_log import RequestLog
from eldr_serve.pipeline.engines import Engines
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.pipeline.warmup import Warmup
from eldr_serve.replicas.autoscaling import IN_FLIGHT
from eldr_serve.replicas.fleet import Fleet
from eldr_serve.router.actor import actor_name, connect
from eldr_serve.router.calls import RouterCalls
from eldr_serve.router.client import RouterClient
from eldr_serve.router.directory import directory
from eldr_serve.router.loop_watch import LoopWatch
from eldr_serve.router.process_metrics import PERIOD_S, IngressMetrics
from eldr_serve.router.settings import RouterSettings
from eldr_serve.signatures.control import PoolControl

if TYPE_CHECKING:
    from eldr_serve.ingress.tracing import Tracing

logger = logging.getLogger(__name__)

_LISTEN_DELAY_S, _POLL_S = 5.0, 0.05  # maximum delay of listening without a decode replica


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
        self._calls = RouterCalls(lambda: connect(actor_name(application), router))
        self._client = RouterClient(self._calls, self._decode, on_predictor=self._start_tokenizer)
        self.gate = Gate(options, admin_key_sha256, self._client.count)
        self._router = router
        engines = Engines(self._prefill, self._decode, max_load_ratio, whole=prefill is None)
        self._tokens = PromptTokens(tokenizer)
        self._whole = engines.whole
        self._tokenizer_task: asyncio.Task[None] | None = None
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
        owner = owner_of_port(application)
        self._port = None if options.port is None else Port(options.host, options.port, owner)

    async def check_health(self) -> None:
        """Raise the exception that ended the background work, if any; the first call starts that work.

        Serve calls this as its health check.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        if self._started.done():
            self._started.result()

    async def _start(self) -> None:
        self._prefill.start()
        self._decode.start()
        if self._whole or self._router.predictor is not None:
            self._start_tokenizer()
            assert self._tokenizer_task is not None
            await self._tokenizer_task
        try:
            await self._calls.configure(self._router)
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
            tenants.share_usage(lambda usage: self._client.call("share_limits", name, usage)),
        )

    def _start_tokenizer(self) -> None:
        """Load the tokenizer once; a predictor may have been swapped in at another ingress."""
        task = self._tokenizer_task
        if task is None or (task.done() and self._client.scorer.tokenizer is None):
            self._tokenizer_task = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        try:
            self._client.scorer.tokenised_by(await self._tokens.fingerprint())
        except ValueError as error:
            logger.warning("requests are placed without predicted signatures: %s", error)

    async def _listen(self) -> None:
        """Listen on the replica's own port, once a decode replica is known or after a maximum delay.

        Until then, other ingresses of the node get the connections.
        """
        if self._port is None:
            return
        until = time.monotonic() + _LISTEN_DELAY_S
        while not self._decode.live and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        self._http = HttpServer(http_application(), self.gate.options, self._port)

    async def _export(self) -> None:
        metrics = IngressMetrics()
        while True:
            metrics.export(self.admin.summary())
            await asyncio.sleep(PERIOD_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the requests in flight, for Serve, which does not see those to the replica's own port."""
        return {IN_FLIGHT: float(self.gate.in_flight)}

    async def __del__(self) -> None:
        """Wait for open responses to end; Serve calls this before it stops the replica."""
        if self._http is not None:
            await self._http.drain()
        elif self._port is not None:
            self._port.release()
        await self._log.stop()

    async def stop(self) -> None:
        """Stop the background work and close all channels."""
        if self._started is not None:
            self._started.cancel()
        if self._tokenizer_task is not None:
            self._tokenizer_task.cancel()
        await self._log.stop()
        await self._client.stop()
        await self._prefill.stop()
        await self._decode.stop()


def _tracing(options: TracingOptions | None) -> Tracing | None:
    if options is None:
        return None
    from eldr_serve.ingress.tracing import Tracing  # slow: imports OpenTelemetry

    return Tracing(options)


def decode_directory(application: str) -> str:
    """Return the name of this process's directory of decode replicas."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Return the name of this process's directory of prefill replicas."""
    return f"{application}/prefill"
