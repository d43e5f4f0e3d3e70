"""Engines that compute nothing: what is left is the serving layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig
from ray.serve.llm.ingress import make_fastapi_ingress

from benchmarks.harness.synthetic import prompt_counts, random_spec, table_near
from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.serving.admission import IngressOptions
from eldr_serve.serving.compat import to_model_metadata
from eldr_serve.serving.ingress import (
    ENDPOINTS,
    EldrIngress,
    application,
    decode_directory,
    prefill_directory,
)
from eldr_serve.serving.path import PathOptions
from eldr_serve.serving.router_settings import RouterSettings
from eldr_serve.serving.servers import ReleaseKv
from eldr_serve.signature import pack_counts

MODEL = "fake"
_MANY = 1_000_000  # as Ray Serve LLM sets it for its engines: they queue inside


@dataclass
class Usage:
    prompt_tokens: int = 300


@dataclass
class Prefilled:
    """What the path reads of a prefill engine's answer."""

    kv_transfer_params: dict[str, Any]
    usage: Usage = field(default_factory=Usage)


class FakePrefill:
    """Answers after `seconds` with a signature of real size."""

    def __init__(self, seconds: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._seconds = seconds
        self._packed = [pack_counts(counts) for counts in prompt_counts(32, rng)]
        self._number = 0

    async def completions(self, request: Any, raw_info: Any = None) -> AsyncGenerator[Any, None]:
        """One answer, as for a prefill call."""
        await asyncio.sleep(self._seconds)
        self._number += 1
        packed = self._packed[self._number % len(self._packed)]
        yield Prefilled(
            {"do_remote_prefill": True, "remote_request_id": request.request_id, SIGNATURE: packed}
        )

    async def release_kv(self, release: ReleaseKv) -> None:
        """There is nothing to release."""

    async def check_health(self) -> None:
        """Always well."""


class FakeDecode:
    """Streams `max_tokens` tokens, one every `gap_s`."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s

    async def completions(self, request: Any, raw_info: Any = None) -> AsyncGenerator[Any, None]:
        """The stream of a decode call."""
        chunk = f'data: {{"id":"{request.request_id}","choices":[{{"index":0,"text":" token"}}]}}\n\n'
        for number in range(request.max_tokens or 1):
            if number:
                await asyncio.sleep(self._gap_s)
            yield chunk
        yield "data: [DONE]\n\n"

    async def check_health(self) -> None:
        """Always well."""


def fake_application(*, decode_replicas: int, prefill_s: float, gap_s: float, seed: int) -> Application:
    """Our ingress, router actor and request routers over engines that compute nothing."""
    name = "bench-streams"
    routers = "eldr_serve.serving.request_router"
    options = {"max_ongoing_requests": _MANY, "ray_actor_options": {"num_cpus": 0.1}}
    prefill = serve.deployment(
        FakePrefill,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{routers}.PrefillRequestRouter",
            request_router_kwargs={"directory_name": prefill_directory(name)},
        ),
        **options,
    ).bind(prefill_s, seed)
    decode = serve.deployment(
        FakeDecode,
        num_replicas=decode_replicas,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{routers}.DecodeRequestRouter",
            request_router_kwargs={"directory_name": decode_directory(name)},
        ),
        **options,
    ).bind(gap_s)
    rng = np.random.default_rng(seed)
    table = table_near(prompt_counts(decode_replicas, rng), decode_replicas, rng, spec=random_spec(rng))
    limits = IngressOptions()
    ingress = serve.deployment(
        make_fastapi_ingress(EldrIngress, endpoint_map=ENDPOINTS, app=application()),
        max_ongoing_requests=2 * limits.max_in_flight,
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress.bind(
        llm_deployments={MODEL: decode},
        model_cards={MODEL: to_model_metadata(MODEL, LLMConfig(model_loading_config={"model_id": MODEL}))},
        prefill=prefill,
        application=name,
        router=RouterSettings(
            model_id=MODEL, policy="locality-band", table=replace(table, model=MODEL).to_bytes()
        ),
        options=limits,
        path_options=PathOptions(),
    )
