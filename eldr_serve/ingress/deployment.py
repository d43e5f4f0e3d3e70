"""The ingress deployment: the HTTP endpoints of the service and their background work.

The ingress parses no more of a request than placement needs: engines validate requests, and answers pass as
bytes. It imports neither vLLM nor Ray Serve LLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from eldr_serve.actors import ACTOR_UNAVAILABLE
from eldr_serve.fleet.directory import get_directory
from eldr_serve.fleet.fleet import Fleet
from eldr_serve.ingress.admin_endpoints import AdminEndpoints
from eldr_serve.ingress.admission import Gate
from eldr_serve.ingress.garbage_collection import make_full_collections_rare
from eldr_serve.ingress.http_application import application as http_application
from eldr_serve.ingress.http_server import HttpServer
from eldr_serve.ingress.metrics_export import IngressMetrics
from eldr_serve.ingress.openai_endpoints import OpenAIEndpoints
from eldr_serve.ingress.options import IngressOptions, TracingOptions
from eldr_serve.ingress.port import Port, owner_of_port
from eldr_serve.ingress.request_log import RequestLog, show_request_lines
from eldr_serve.ingress.status import IngressStatus
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.monitoring.ray_metrics import PERIOD_S
from eldr_serve.monitoring.supervision import supervise
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.pipeline.services import Services
from eldr_serve.pipeline.warmup import Warmup
from eldr_serve.replicas.autoscaling import IN_FLIGHT
from eldr_serve.router.actor import actor_name, connect
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_client.calls import RouterCalls
from eldr_serve.router_client.client import RouterClient
from eldr_serve.signatures.coordinator_client import CoordinatorClient

if TYPE_CHECKING:
    from eldr_serve.ingress.tracing import Tracing

logger = logging.getLogger(__name__)

_CONFIGURE_WAIT_S, _CONFIGURE_RETRY_S = 10.0, 1.0  # wait of the first health check, time between tries
_LISTEN_DELAY_S = 5.0  # without a decode replica, the port opens after this time
_POLL_S = 0.05


class EldrIngress:
    """An ingress replica.

    Attributes:
        gate: admits requests.
        openai, admin: handle the requests to the endpoints in ENDPOINTS.

    Args:
        prefill, decode: handles of the deployments, used only to check their health and to discover their
            replicas. Without `prefill`, decode engines prefill as well.
        tokenizer: location of the model's tokenizer, a folder or a name on the hub.
        model_cards: the model and its adapters as `GET /v1/models` describes them, the model first.
        openapi: the OpenAPI document.
        application: name of the application, part of the name of the DecodeRouter actor.
        router_settings: start arguments of the DecodeRouter actor.
        prefill_options: options for the choice of prefill replicas.
        admin_key_sha256: SHA-256 (hex) of the admin key; if None, requests that need it are refused.
        engine_version: version that `GET /version` returns.

    Raises:
        PortTakenError: another application or program has the port of `options`.
    """

    _started: asyncio.Task[None] | None = None
    _configuring: asyncio.Task[None] | None = None
    _tokenizer_task: asyncio.Task[None] | None = None
    _http: HttpServer | None = None
    _metrics: IngressMetrics | None = None

    def __init__(
        self,
        *,
        prefill: DeploymentHandle | None,
        decode: DeploymentHandle,
        tokenizer: str,
        model_cards: list[dict[str, Any]],
        openapi: dict[str, Any],
        application: str,
        router_settings: RouterSettings,
        options: IngressOptions,
        path_options: PathOptions,
        prefill_options: PrefillRouterOptions,
        admin_key_sha256: str | None = None,
        engine_version: str = "",
    ) -> None:
        fleets = self._fleets = _fleets(application, prefill_options, whole=prefill is None)
        counters = self._counters = IngressCounters()
        find_router = partial(connect, actor_name(application), router_settings)
        calls = self._calls = RouterCalls(find_router, router_settings)
        router = self._router = RouterClient(
            calls, lambda: fleets.decode.live_workers, counters=counters, on_predictor=self._start_tokenizer
        )
        self.gate = Gate(options, admin_key_sha256, counters)
        self._router_settings = router_settings
        self._tokenizer = PromptTokenizer(tokenizer)
        self._services = Services(
            fleets=fleets,
            router_client=router,
            counters=counters,
            options=path_options,
            tokenizer=self._tokenizer,
        )
        _prepare_process()
        self._tracing = _tracing(options.tracing)
        handles = [handle for handle in (prefill, decode) if handle is not None]
        model_id = router_settings.model_id
        self._warmup = Warmup(fleets=fleets, handles=handles, router=router, model_id=model_id)
        self._status = self._make_status(model_id)
        self.openai = OpenAIEndpoints(
            request_path=RequestPath(self._services),
            router=router,
            counters=counters,
            log=RequestLog(every=options.log_requests == "all"),
            tracing=self._tracing,
            max_sequences=options.max_sequences,
            model_cards=model_cards,
            openapi=openapi,
        )
        self.admin = AdminEndpoints(
            gate=self.gate,
            operator=router.operator,
            scorer=router.scorer,
            status=self._status,
            decode=fleets.decode,
            tokenizer=self._tokenizer,
            pool=CoordinatorClient(application),
            engine_version=engine_version,
        )
        self._port = _port(options, application)

    def _make_status(self, model_id: str) -> IngressStatus:
        services = self._services
        return IngressStatus(
            gate=self.gate,
            router_client=services.router_client,
            fleets=services.fleets,
            prefill_admission=services.prefill_admission,
            prediction_recorder=services.prediction_recorder,
            stage_latencies=services.stage_latencies,
            warmup=self._warmup,
            model_id=model_id,
        )

    async def check_health(self) -> None:
        """Raise the exception that ended the background work, if any; the first call starts that work.

        Serve calls this as its health check, and lets the replica replace an older one only after the first
        call. Therefore, the first call waits some time for the router. It raises SwapRefusedError if the
        router refuses the deployed settings.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
            self._configuring = asyncio.create_task(self._configure_router())
            await asyncio.wait([self._configuring], timeout=_CONFIGURE_WAIT_S)
        for task in (self._configuring, self._started):
            if task is not None and task.done():
                task.result()

    async def _configure_router(self) -> None:
        """Send the deployed settings to the router; try again while it is unavailable.

        Raises:
            SwapRefusedError: the router refuses the settings.
        """
        has_warned = False
        while True:
            try:
                return await self._calls.configure(self._router.settings)
            except ACTOR_UNAVAILABLE as error:
                if not has_warned:
                    logger.warning("DecodeRouter is not up yet: %r", error)
                has_warned = True
            await asyncio.sleep(_CONFIGURE_RETRY_S)

    async def _start(self) -> None:
        self._fleets.prefill.start()
        self._fleets.decode.start()
        needs_ids = self._fleets.decode_engines_prefill or self._services.options.local_prefill_tokens
        if needs_ids or self._router_settings.predictor is not None:
            self._start_tokenizer()
            assert self._tokenizer_task is not None
            await self._tokenizer_task
        self._router.start()
        tenants = self.gate.tenants
        name = uuid.uuid4().hex
        works: dict[str, Callable[[], Awaitable[None]]] = {
            "the export of metrics": self._export,
            "the event-loop monitor": self._status.watch.run,
            "the warm-up": self._warmup.run,
            "the keys-file monitor": tenants.watch,
            "the exchange of tenants' usage": partial(
                tenants.share_usage, lambda usage: self._router.share_limits(name, usage)
            ),
        }
        await asyncio.gather(
            self._serve_port(),
            *(supervise(what, work, count=self._counters.count_failed_work) for what, work in works.items()),
        )

    def _start_tokenizer(self) -> None:
        """Load the tokenizer once, because a predictor may have been swapped in at another ingress."""
        task = self._tokenizer_task
        if task is None or (task.done() and self._router.scorer.tokenizer is None):
            self._tokenizer_task = asyncio.get_running_loop().create_task(self._load_tokenizer())

    async def _load_tokenizer(self) -> None:
        try:
            self._router.scorer.set_tokenizer(await self._tokenizer.fingerprint())
        except ValueError as error:
            logger.warning("requests are placed without predicted signatures: %s", error)

    async def _serve_port(self) -> None:
        """Serve the replica's own port, once a decode replica is known or after a maximum delay.

        Until then, other ingresses of the node get the connections.
        """
        if self._port is None:
            return
        until_s = time.monotonic() + _LISTEN_DELAY_S
        while not self._fleets.decode.live_workers and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        options = self.gate.options
        self._http = HttpServer(http_application(options.cors_origins), options, self._port)
        await self._http.wait()

    async def _export(self) -> None:
        # If this runs again after a failure, the counters continue.
        metrics = self._metrics = self._metrics or IngressMetrics()
        self._services.stage_latencies.on_recorded = metrics.observe_stage
        while True:
            metrics.export(self._status.own_status())
            await asyncio.sleep(PERIOD_S)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the requests in flight, those to the own port included, for Serve's autoscaling."""
        return {IN_FLIGHT: float(self.gate.in_flight)}

    # This is a method of the class, whereas EngineServer has an attribute of the object. The class that
    # `serve.ingress` derives from this one has its own asynchronous `__del__`, which ends the HTTP
    # application and then awaits this method. An attribute would hide the derived `__del__` from Serve, and
    # Python would still call the derived one when it frees the object.
    async def __del__(self) -> None:
        """Wait for open responses to end; Serve calls this before it stops the replica."""
        if self._http is not None:
            await self._http.drain()
        elif self._port is not None:
            self._port.release()
        if self._tracing is not None:
            await self._tracing.stop()

    async def stop(self) -> None:
        """Stop the background work and close all channels.

        Only an ingress whose process continues needs this, as in tests, since Serve ends the process after
        `__del__`.
        """
        for task in (self._started, self._configuring, self._tokenizer_task):
            if task is not None:
                task.cancel()
        if self._tracing is not None:
            await self._tracing.stop()
        await self._router.stop()
        await self._fleets.prefill.stop()
        await self._fleets.decode.stop()


def _prepare_process() -> None:
    """Apply the settings of an ingress that hold for its whole process."""
    show_request_lines()
    make_full_collections_rare()


def _fleets(application: str, options: PrefillRouterOptions, *, whole: bool) -> Fleets:
    prefill = Fleet(get_directory(prefill_directory(application)), max_kv_usage=options.max_kv_usage)
    return Fleets(
        prefill, Fleet(get_directory(decode_directory(application))), options, decode_engines_prefill=whole
    )


def _tracing(options: TracingOptions | None) -> Tracing | None:
    if options is None:
        return None
    from eldr_serve.ingress.tracing import Tracing  # this imports OpenTelemetry, which is slow

    return Tracing(options)


def _port(options: IngressOptions, application: str) -> Port | None:
    if options.port is None:
        return None
    return Port(options.host, options.port, owner_of_port(application))


def decode_directory(application: str) -> str:
    """Return the name of this process's directory of decode replicas."""
    return f"{application}/decode"


def prefill_directory(application: str) -> str:
    """Return the name of this process's directory of prefill replicas."""
    return f"{application}/prefill"
