"""The request path over fake engines and a fake router client."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from eldr_serve.experts.signature import pack_counts
from eldr_serve.metrics import IngressEvent
from eldr_serve.monitoring.ingress_counters import IngressCounters
from eldr_serve.pipeline.context.request_context import RequestContext
from eldr_serve.pipeline.fleets import Fleets
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.pipeline.services import Services
from eldr_serve.request import Request, RequestFields
from eldr_serve.scheduling import PlacementRequest
from eldr_serve.scheduling.decode_loads import DecodeLoads
from eldr_serve.scheduling.prefixes import PromptBlocks
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.faults.virtual_time import VirtualLoop
from tests.support.fake_fleet import FakeFleet, answer_with, prefill_result

COUNTS = np.arange(12, dtype=np.uint32).reshape(3, 4)
good_prefill = answer_with(
    prefill_result(do_remote_prefill=True, remote_request_id="r", **{EXPERT_COUNTS_KEY: pack_counts(COUNTS)})
)
good_decode = answer_with(b"a", b"b", b"c")
TOKENS = 12  # tokens of the stream whose events follow
END = b"data: [DONE]\n\n"
EVENTS = [b'data: {"created":77,"text":"%d"}\n\n' % number for number in range(TOKENS)]
WHOLE = b"".join(EVENTS)


def pack_ids(*ids: int) -> bytes:
    """Return token ids as they are sent."""
    return np.asarray(ids, np.uint32).tobytes()


def request_context(method: str = "completions", **fields: Any) -> RequestContext:
    """Return the context that the ingress makes of a client's request."""
    body = {"model": "m", "prompt": "hello", "max_tokens": 5, **fields}
    request_fields = RequestFields.model_validate(body)
    return RequestContext(Request(method=method, body=json.dumps(body).encode(), fields=request_fields))


def on(replica: str, answer: Any, others: Any = good_decode) -> Any:
    """Return engines of which this replica answers by `answer`, and every other replica by `others`."""
    return lambda sent: (answer if sent.replica == replica else others)(sent)


class FakeRouterClient:
    """A RouterClient that leases the first worker that is not excluded.

    Attributes:
        loads: loads of the decode workers as the router answers them; None: it does not answer.
    """

    router_unreachable = False
    queue_wait_s = 0.0

    def __init__(self, workers: Sequence[str] = ("d0", "d1", "d2")) -> None:
        self.workers = workers
        self.loads: DecodeLoads | None = None
        self.blocks: list[PromptBlocks | None] = []
        self.placements: list[tuple[PlacementRequest, Any]] = []
        self.token_ids: list[Any] = []
        self.counts: list[tuple[str, Any, Any, int]] = []
        self.waits: list[float] = []
        self.resumed_at: list[int] = []  # tokens that the answer had at each placement
        self.leases: set[str] = set()
        self.releases: list[bool] = []  # whether the answer was complete
        self.tokens: list[int] = []
        self.cached_tokens = 0  # cached tokens of each lease

    async def place(
        self,
        request: PlacementRequest,
        counts: Any,
        *,
        token_ids: Any,
        wait_s: float,
        generated_tokens: int,
    ) -> Lease:
        self.placements.append((request, counts))
        self.token_ids.append(token_ids)
        self.waits.append(wait_s)
        self.resumed_at.append(generated_tokens)
        self.leases.add(request.request_id)
        replica = next(r for r in self.workers if r not in request.exclude)
        return Lease(
            request, LeaseState.GRANTED, worker=replica, position=0, cached_tokens=self.cached_tokens
        )

    async def decode_loads(self, blocks: PromptBlocks | None) -> DecodeLoads:
        self.blocks.append(blocks)
        if self.loads is None:
            raise ConnectionError
        return self.loads

    def release(self, request_id: str, *, is_complete: bool) -> None:
        self.releases.append(is_complete)
        self.leases.discard(request_id)

    def set_generated_tokens(self, request_id: str, tokens: int) -> None:
        assert request_id in self.leases
        self.tokens.append(tokens)

    def set_measured_counts(self, request_id: str, token_ids: Any, counts: Any, prompt_tokens: int) -> None:
        assert request_id in self.leases
        self.counts.append((request_id, token_ids, counts, prompt_tokens))


class RecordedCounters(IngressCounters):
    """Counters that record the events in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def count(self, event: IngressEvent, increase: int = 1) -> None:
        self.events += [event] * increase


class Pipeline:
    """The path over engines that answer by `prefill` and `decode`, or over whole replicas."""

    def __init__(
        self,
        prefill: Any = good_prefill,
        decode: Any = good_decode,
        *,
        workers: Sequence[str] = ("d0", "d1", "d2"),
        whole: bool = False,
        **options: Any,
    ) -> None:
        self.prefill = FakeFleet(prefill, "p0", "p1")
        self.decode = FakeFleet(decode, *workers)
        self.router: Any = FakeRouterClient(workers)
        self.counters = RecordedCounters()
        fleets: Any = self.prefill, self.decode
        path_options = PathOptions(**{"retry_backoff_s": 0.0, **options})
        tokenizer: Any = PromptTokenizer("") if whole or path_options.local_prefill_tokens else None
        self.services = Services(
            fleets=Fleets(*fleets, PrefillRouterOptions(), decode_engines_prefill=whole),
            router_client=self.router,
            counters=self.counters,
            options=path_options,
            tokenizer=tokenizer,
        )
        self.path = RequestPath(self.services)

    async def run(self, **fields: Any) -> bytes:
        """Return the answer to a request, after the lease has ended."""
        try:
            return b"".join([chunk async for chunk in self.path.generate(request_context(**fields))])
        finally:
            await asyncio.sleep(0.01)
            assert not self.router.leases


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine on virtual time, which advances when all tasks wait."""
    loop = VirtualLoop(random.Random(0))
    gc.disable()  # a collection of all objects of the test process would block the loop for up to 0.5 s
    try:
        with patch("time.monotonic", loop.time):
            loop.run(main())
    finally:
        gc.enable()
    assert not loop.errors, loop.errors
