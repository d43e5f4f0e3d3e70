"""The contract of all engines (`engine_contract`), checked with an engine that computes nothing.

Engines that are broken on purpose show that the checks find violations.
"""

from __future__ import annotations

import asyncio
import runpy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs, to_builtins

from eldr_serve.engine import active_backend
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY, GenerationReport
from eldr_serve.engine.fake import FakeCalibrationEngine, FakeConfig, FakeEngine
from eldr_serve.engine.protocol import EngineRequest, PrefilledPrompt, Send
from eldr_serve.errors import UserInputError
from eldr_serve.experts.sample import ExpertSample
from eldr_serve.experts.signature import pack_counts, unpack_counts
from tests.support import engine_contract
from tests.support.engine_contract import CHECKS, Subject, run_check

TOKENS, TOP_K = 8, 2
COUNTS = np.array([[[16, 0, 0, 0], [4, 4, 4, 4], [1, 2, 3, 10]], [[8, 8, 0, 0]] * 3], np.uint32)
CONFIG = FakeConfig(COUNTS, prompt_tokens=TOKENS)


def test_a_report_has_only_known_values_on_the_wire() -> None:
    assert to_builtins(GenerationReport()) == {}
    assert to_builtins(GenerationReport(0.5, 3.0)) == {"transport_s": 0.5, "cached_tokens": 3.0}


async def check_engine(kind: type[FakeEngine], check: str) -> None:
    engine = await kind.start(CONFIG)
    try:
        await run_check(CHECKS[check], Subject(engine, engine, [0] * TOKENS, (3, 4), TOP_K))
    finally:
        await engine.stop()


@pytest.mark.parametrize("check", CHECKS)
async def test_an_engine_satisfies_the_contract(check: str) -> None:
    await check_engine(FakeEngine, check)


@pytest.mark.parametrize("routes", [False, True])
def test_a_calibration_engine_counts_prefill_and_decode_separately(routes: bool) -> None:
    engine_contract.a_calibration_engine_counts_prefill_and_decode_separately(
        FakeCalibrationEngine(CONFIG), (3, 4), TOP_K, routes
    )


def test_the_environment_selects_the_kind_of_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELDR_ENGINE_BACKEND", "eldr_serve.engine.fake:FakeTokenizer")
    backend = runpy.run_path(active_backend.__file__)["BACKEND"]
    assert type(backend).__name__ == "FakeTokenizer"
    monkeypatch.setenv("ELDR_ENGINE_BACKEND", "nowhere")
    with pytest.raises(UserInputError, match="ELDR_ENGINE_BACKEND 'nowhere' cannot be imported"):
        runpy.run_path(active_backend.__file__)


# -- broken engines --------------------------------------------------------------------------------------


class CountsOneTokenTooMany(FakeEngine):
    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        prefilled = await super().prefill(request)
        counts = unpack_counts(prefilled.kv_transfer_params[EXPERT_COUNTS_KEY])
        counts[:, 0] += TOP_K
        params = prefilled.kv_transfer_params | {EXPERT_COUNTS_KEY: pack_counts(counts)}
        return replace(prefilled, kv_transfer_params=params)


class ReturnsNoBlocks(FakeEngine):
    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        prefilled = await super().prefill(request)
        counts = prefilled.kv_transfer_params[EXPERT_COUNTS_KEY]
        return replace(prefilled, kv_transfer_params={EXPERT_COUNTS_KEY: counts})


class ReportsOneLayerTooMany(FakeEngine):
    async def measure_shape(self) -> tuple[int, int]:
        layers, experts = await super().measure_shape()
        return layers + 1, experts


class RaisesForUnknownPrompts(FakeEngine):
    async def release(self, request_id: str) -> None:
        self.held_prompts.remove(request_id)


class ContinuesCancelledCalls(FakeEngine):
    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        return await asyncio.shield(asyncio.create_task(super().generate(request, send)))


class OmitsTheLastEvent(FakeEngine):
    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        def send_without_end(payload: bytes, tokens: int, ids: bytes = b"") -> None:
            send(payload.replace(b"data: [DONE]\n\n", b""), tokens, ids)

        return await super().generate(request, send_without_end)


class IgnoresGeneratedTokens(FakeEngine):
    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        return await super().generate(structs.replace(request, generated=b""), send)


class PrefillsRefusedRequests(FakeEngine):
    async def prefill(self, request: EngineRequest) -> PrefilledPrompt:
        return await super().prefill(structs.replace(request, body=b"{}"))


class SamplesEveryRequest(FakeEngine):
    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        return await super().generate(structs.replace(request, sampled=True), send)


class CountsOneStepTooMany(FakeEngine):
    def take_samples(self) -> list[ExpertSample]:
        return [replace(s, decode_steps=s.decode_steps + 1) for s in super().take_samples()]


class SamplesCancelledRequests(FakeEngine):
    async def generate(self, request: EngineRequest, send: Send) -> GenerationReport:
        try:
            return await super().generate(request, send)
        except asyncio.CancelledError:
            self._keep_sample(request, 3)
            raise


@pytest.mark.parametrize(
    ("kind", "found_by"),
    [
        (CountsOneTokenTooMany, "prefill_gives_ids_a_handle_and_counts_of_the_prompt"),
        (ReturnsNoBlocks, "prefill_gives_ids_a_handle_and_counts_of_the_prompt"),
        (ReportsOneLayerTooMany, "the_shape_is_that_of_the_counts"),
        (RaisesForUnknownPrompts, "a_prompt_may_be_released_twice_and_one_that_was_never_there"),
        (ContinuesCancelledCalls, "a_call_that_is_cancelled_ends_in_the_engine"),
        (OmitsTheLastEvent, "an_answer_is_a_stream_that_ends"),
        (IgnoresGeneratedTokens, "what_an_engine_that_was_lost_has_sent_is_not_sent_again"),
        (PrefillsRefusedRequests, "a_request_is_refused_by_prefill_as_by_generate"),
        (SamplesEveryRequest, "a_sampled_request_gives_a_sample_once"),
        (CountsOneStepTooMany, "a_sampled_request_gives_a_sample_once"),
        (SamplesCancelledRequests, "a_sampled_request_that_is_cancelled_gives_no_sample"),
    ],
)
async def test_an_engine_that_violates_the_contract_is_found(kind: Any, found_by: str) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        await check_engine(kind, found_by)
