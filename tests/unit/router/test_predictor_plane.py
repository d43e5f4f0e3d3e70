"""Placement by predicted expert counts, and how measured counts replace them."""

import asyncio
import logging
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from eldr_serve.engine.vllm.measurements import MEASUREMENTS
from eldr_serve.errors import SwapRefusedError
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.pipeline.prefill.prompt_tokenizer import PromptTokenizer
from eldr_serve.router import settings_check
from eldr_serve.router.state import RouterState
from eldr_serve.router.status import router_status
from eldr_serve.router_protocol.messages import IngressReport, Restore, StreamLatencies
from eldr_serve.scheduling.activation import levels_of
from eldr_serve.scheduling.policies.marginal_cost import MarginalCost
from eldr_serve.scheduling.prefixes import prompt_blocks
from tests.support.fake_router import (
    FakeActor,
    connected_client,
    loads,
    place,
    place_one,
    release,
    router_and_client,
    router_state,
    wait_until,
)
from tests.support.ingress_app import COMPLETIONS, HELLO, KEY, running_app
from tests.support.tables import request, unit_table

L, E, K, V = 2, 8, 2, 16
IDS = np.array([1, 1, 3], np.uint32)


def predictor(**changes: Any) -> SignaturePredictor:
    """Return a predictor by which token t makes expert t % E of each layer more likely."""
    experts = np.linalg.qr(np.random.default_rng(0).normal(size=(L * E, E)))[0].T.reshape(E, L, E)
    towards = np.tile(np.eye(E)[:, None] - 1 / E, (1, L, 1)).reshape(E, -1)
    tokens = np.tile(towards @ experts.reshape(E, -1).T, (V // E, 1))
    arrays = np.full((L, E), K / E), tokens, experts, np.ones(V)
    arrays = (np.ascontiguousarray(array, np.float32) for array in arrays)
    return replace(SignaturePredictor("m", "t", K, *arrays), **changes)


FILE = predictor().to_bytes()


def narrow() -> bytes:
    """Return a predictor file for half as many experts."""
    return predictor(
        mean=np.full((L, E // 2), 2 * K / E, np.float32),
        expert_factors=np.zeros((0, L, E // 2), np.float32),
        token_factors=np.zeros((V, 0), np.float32),
    ).to_bytes()


def counts(token: int, tokens: int = 3) -> np.ndarray:
    """Return the uint32[L,E] expert counts of a prompt that repeats this token."""
    result = np.zeros((L, E), np.uint32)
    result[:, [token % E, (token + 1) % E]] = tokens
    return result


PREDICTING: dict[str, Any] = {"policy": "marginal-cost", "table": None, "predictor": FILE}


def marginal_cost(state: RouterState) -> MarginalCost:
    policy = state.placer.policy
    assert isinstance(policy, MarginalCost)
    return policy


def levels_of_requests(state: RouterState) -> dict[str, tuple[int, Any]]:
    """Return the worker position and the activation levels of each running request."""
    return marginal_cost(state).activation.running


def levels(prompt_counts: np.ndarray, tokens: int) -> Any:
    """Return the activation levels of a prompt with these counts."""
    return levels_of((prompt_counts.reshape(-1) / tokens).astype(np.float32))


def test_a_predictor_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    state = router_state(table=None, policy="marginal-cost")
    state.expect_counts(L, E)
    assert router_status(state)["predictor"] is None
    live = state.live_settings.swap_predictor(FILE, "t")
    assert (live.predictor, live.predictor_version) == (FILE, 1)
    for bad, tokenizer, message in (
        (b"nonsense", "t", "not an eldr-serve file"),
        (predictor(model="n").to_bytes(), "t", "model n, not m"),
        (FILE, "u", "tokenizer t, not u"),
        (narrow(), "t", "layers and experts"),
    ):
        with pytest.raises(SwapRefusedError, match=message) as refused:
            state.live_settings.swap_predictor(bad, tokenizer)
        assert "\n" not in str(refused.value)
        assert state.settings is live
    with pytest.raises(SwapRefusedError, match="model n"):
        RouterState(model_id="m", policy="marginal-cost", predictor=predictor(model="n").to_bytes())


def test_settings_larger_than_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_check, "MAX_SETTINGS_BYTES", len(FILE))
    state = router_state(table=3, policy="marginal-cost")
    with pytest.raises(SwapRefusedError, match="MiB together"):
        state.live_settings.swap_predictor(FILE, "t")
    assert state.settings.predictor is None


def test_measured_counts_replace_predicted_ones_in_loads_and_policy() -> None:
    state = router_state(workers=2, table=None, policy="marginal-cost")
    (lease,) = place(state, request("a", 3, expert_counts=counts(1).astype(np.float16), predicted=True))
    state.leases.set_generated_tokens({"a": 4})
    for counted in (request("a", 30, expert_counts=counts(5, 30)), request("gone", 7)):
        state.leases.set_measured_counts(counted)
    assert loads(state)[lease.worker] == (1, 34)
    position, measured = levels_of_requests(state)["a"]
    assert position == lease.position
    np.testing.assert_array_equal(measured, levels(counts(5), 3))
    assert (state.counters["counts_predicted"], state.counters["counts_measured"]) == (1, 2)
    release(state, "a")
    assert set(loads(state).values()) == {(0, 0)}
    assert not levels_of_requests(state)
    assert not marginal_cost(state).activation.squared_levels.any()


def test_the_status_has_the_prediction_quality_of_connected_ingresses() -> None:
    state = router_state(table=None, policy="marginal-cost", predictor=FILE, ingresses="ab")
    for ingress, prompts, gain, on in (("a", 30, 0.5, True), ("b", 10, -0.5, False)):
        prediction = {"on": on, "prompts": prompts, "cosine": gain, "gain": gain}
        state.ingresses.add_report(ingress, IngressReport(prediction=prediction))
    expected = {"version": 1, "ingresses": 2, "prompts": 40, "on": 1, "cosine": 0.25, "gain": 0.25}
    assert router_status(state)["predictor"] == expected
    state.ingresses.drop_ingress("b")
    assert router_status(state)["predictor"]["ingresses"] == 1
    state.live_settings.swap_predictor(FILE, "t")
    assert router_status(state)["predictor"] == {
        "version": 2,
        "ingresses": 0,
        "prompts": 0,
        "on": 0,
        "cosine": 0.0,
        "gain": 0.0,
    }


def test_a_configured_predictor_of_another_shape_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    state = router_state(table=None, policy="marginal-cost", predictor=narrow())
    wrong = np.full((L, E // 2), 1.0, np.float16)
    place(state, request("a", 3, expert_counts=wrong, predicted=True))
    state.expect_counts(L, E)
    assert state.settings.predictor is None
    assert caplog.messages == [
        "the predictor was discarded: "
        f"the signature predictor is for layers and experts {(L, E // 2)}, not {(L, E)}"
    ]
    # From an ingress that still has the predictor.
    place(state, request("b", 3, expert_counts=wrong, predicted=True))
    assert state.counters["counts_missing"] == 1
    place(state, request("c", 3, expert_counts=counts(5)))
    np.testing.assert_array_equal(levels_of_requests(state)["c"][1], levels(counts(5), 3))
    release(state, "a", "b", "c")
    assert set(loads(state).values()) == {(0, 0)}


def test_predictions_of_another_shape_are_dropped_even_without_a_predictor() -> None:
    state = router_state(table=None, policy="marginal-cost")
    wrong = np.full((L, E // 2), 1.0, np.float16)  # counts from an ingress that still has a predictor
    place(state, request("a", 3, expert_counts=wrong, predicted=True))
    state.expect_counts(L, E)
    assert state.placer.running["a"].request.expert_counts is None


@pytest.mark.parametrize("restored", [False, True])
def test_a_configured_table_of_another_shape_is_dropped_with_the_predictor(restored: bool) -> None:
    table = unit_table(3, num_layers=L + 1).to_bytes()
    state = RouterState(model_id="m", policy="locality-band", table=table, predictor=narrow())
    if restored:
        state.restore_from_ingress(Restore("c", counts_shape=(L, E)))
    else:
        state.expect_counts(L, E)
    assert (state.settings.table, state.live_settings.table, state.settings.predictor) == (None, None, None)
    assert state.counters["tables_discarded"] == 1
    state.live_settings.set_policy("least-tokens", {})
    state.live_settings.swap_predictor(FILE, "t")


async def test_a_client_rejects_a_predictor_of_another_shape(caplog: pytest.LogCaptureFixture) -> None:
    async with router_and_client("r0", policy="marginal-cost", table=None) as (actor, client):
        await client.place(request("first"), None)  # the client has connected
        client.scorer.shape = (L, E)  # the router does not know this shape yet
        actor.state.live_settings.swap_predictor(narrow(), "t")
        await client.place(request("a", 3), None, token_ids=IDS)
        assert client.scorer.predictor is None
        assert "layers and experts" in caplog.text


def test_a_policy_keeps_its_state_when_only_the_predictor_is_swapped() -> None:
    state = router_state(table=None, policy="marginal-cost")
    state.expect_counts(L, E)
    for name, token in (("a", 1), ("b", 5)):
        place(state, request(name, 3, expert_counts=counts(token)))
    policy = marginal_cost(state)
    state.live_settings.swap_predictor(FILE, "t")
    assert state.placer.policy is policy
    assert policy.profiles.vectors.any()


async def test_predictions_replace_missing_counts_and_measured_counts_train_the_predictor() -> None:
    async with router_and_client("r0", "r1", **PREDICTING) as (actor, client):
        await client.place(request("first"), counts(0))  # this client receives the predictor
        lease = await client.place(request("a", 3), None, token_ids=IDS)
        sent = actor.requests[-1]
        assert sent.predicted
        assert sent.expert_counts.dtype == np.float16  # half the bytes of float32
        np.testing.assert_allclose(sent.expert_counts, predictor().predict(IDS), rtol=1e-3)
        assert lease.reason == "marginal-cost"
        assert actor.state.counters["counts_predicted"] == 1
        # Without token ids there is no prediction, and measured counts need none.
        assert (await client.place(request("b"), None)).reason == "marginal-cost"
        assert actor.state.counters["counts_missing"] == 1
        await client.place(request("c", 3), counts(1), token_ids=IDS)
        assert not actor.requests[-1].predicted
        assert client.scorer.predictor is not None
        assert client.scorer.predictor.num_prompts == 1


async def test_only_the_first_placement_of_a_prompt_trains_the_predictor() -> None:
    async with router_and_client("r0", "r1", **PREDICTING) as (_, client):
        await client.place(request("first"), counts(0))
        await client.place(request("a", 3), counts(1), token_ids=IDS)
        await client.place(request("a", 3, worker_failed=True), counts(1), token_ids=IDS)
        resumed = request("a", 3, resumed_tokens=4)
        await client.place(resumed, counts(1, 7), token_ids=IDS, generated_tokens=4)
        assert client.scorer.predictor is not None
        assert client.scorer.predictor.num_prompts == 1


async def test_measured_counts_reach_the_router_and_its_restart() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    actor.state.live_settings.swap_predictor(FILE, "t")
    async with connected_client(actor, "r0", "r1", timeout_s=0.1) as client:
        await client.place(request("first"), counts(0))
        await client.place(request("a", 3), None, token_ids=IDS)
        client.set_measured_counts("a", IDS, counts(5, 40), 40)
        client.set_measured_counts("gone", IDS, counts(5, 40), 40)
        await wait_until(lambda: actor.state.counters["counts_measured"] == 1)
        np.testing.assert_array_equal(levels_of_requests(actor.state)["a"][1], levels(counts(5), 3))
        assert actor.running["a"].request.prompt_tokens == 40
        assert client.scorer.predictor is not None
        assert client.scorer.predictor.num_prompts == 2
        await wait_until(lambda: (router_status(actor.state)["predictor"] or {})["prompts"] == 2)
        actor.alive = False
        client.release("first")
        await wait_until(lambda: client.router_unreachable)
        actor.restart()
        await wait_until(lambda: not client.router_unreachable and "a" in actor.running)
        np.testing.assert_array_equal(levels_of_requests(actor.state)["a"][1], levels(counts(5), 3))
        assert actor.state.settings.predictor == FILE
        assert client.scorer.predictor.num_prompts == 2  # it keeps its state


async def test_measured_counts_are_sent_again_after_a_lost_channel() -> None:
    async with router_and_client("r0", "r1", **PREDICTING) as (actor, client):
        await client.place(request("first"), counts(0))
        await client.place(request("a", 3), None, token_ids=IDS)
        actor.alive = False
        client.set_measured_counts("a", IDS, counts(5, 40), 40)
        await wait_until(lambda: client.router_unreachable)
        assert actor.running["a"].request.predicted
        actor.alive = True
        await wait_until(lambda: not actor.running["a"].request.predicted)
        assert actor.running["a"].request.prompt_tokens == 40


async def test_a_predictor_worse_than_the_mean_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    async with router_and_client("r0", **PREDICTING) as (actor, client):
        await client.place(request("first"), counts(0))
        assert client.scorer.predictor is not None
        rng = np.random.default_rng(0)
        with caplog.at_level(logging.WARNING):
            for _ in range(80):  # the experts do not depend on the tokens
                ids = np.full(3, rng.integers(V), np.uint32)
                client.set_measured_counts("gone", ids, counts(int(rng.integers(E))), 3)
        assert not client.scorer.predictor.is_enabled
        assert "the signature predictor is off" in caplog.text
        await client.place(request("a", 3), None, token_ids=IDS)
        sent = actor.requests[-1]
        assert sent.counts_missing
        assert not sent.predicted
        await wait_until(lambda: (router_status(actor.state)["predictor"] or {})["on"] == 0)


async def test_a_predictor_that_does_not_fit_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with router_and_client("r0", **PREDICTING) as (_, client):
        client.scorer.tokenizer = "another"
        await client.place(request("a", 3), None, token_ids=IDS)
        assert client.scorer.predictor is None
        assert "tokenizer t, not another" in caplog.text
        client.scorer.predictor = OnlinePredictor(predictor())
        await client.place(request("b", 3), counts(1)[:1], token_ids=IDS)
        assert client.scorer.predictor is None
        assert "cannot be used" in caplog.text


async def test_the_router_and_its_restart_know_which_prefixes_workers_have() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    prompt = prompt_blocks(np.arange(40, dtype=np.uint32), 4)
    async with connected_client(actor, "r0", "r1", timeout_s=0.1) as client:
        first = await client.place(request("a", 40, blocks=prompt), None, token_ids=IDS)
        assert first.worker in ("r0", "r1")
        client.set_measured_counts("a", IDS, counts(5, 41), 41)
        await wait_until(lambda: actor.state.counters["counts_measured"] == 1)
        assert actor.messages[-1].request.blocks is None  # the blocks are sent once
        assert actor.state.placer.workers.prefixes.cached_tokens([first.worker], prompt).tolist() == [36]
        actor.alive = False
        client.release("gone")
        client.record_stream(StreamLatencies(0.5, None))
        await wait_until(lambda: client.router_unreachable)
        actor.restart()
        await wait_until(lambda: not client.router_unreachable and "a" in actor.running)
        assert actor.state.placer.workers.prefixes.cached_tokens([first.worker], prompt).tolist() == [36]


async def test_measured_counts_go_to_the_waiting_call() -> None:
    waiting, cancelled = (asyncio.create_task(MEASUREMENTS.wait_for_counts(name)) for name in "ab")
    await asyncio.sleep(0)
    assert [MEASUREMENTS.awaits_counts(name) for name in "abc"] == [True, True, False]
    cancelled.cancel()
    await asyncio.to_thread(
        MEASUREMENTS.deliver_counts, {"a": (9, "packed"), "b": (1, "late"), "c": (1, "unexpected")}
    )
    assert await waiting == (9, "packed")
    assert not any(MEASUREMENTS.awaits_counts(name) for name in "abc")


async def test_an_ingress_loads_the_tokenizer_for_a_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ingress received the predictor."""
    monkeypatch.setattr(PromptTokenizer, "fingerprint", AsyncMock(return_value="t"))
    actor = FakeActor(policy="marginal-cost", table=None)
    async with running_app(actor=actor) as app:
        client = app.router_client
        assert client.scorer.tokenizer is None
        actor.state.live_settings.swap_predictor(FILE, "t")
        assert (await app.post(COMPLETIONS, HELLO)).status_code == 200
        await wait_until(lambda: client.scorer.tokenizer == "t")
        client.scorer.predictor = OnlinePredictor(predictor())
        client.scorer.set_tokenizer("t")
        assert client.scorer.predictor is not None
        client.scorer.set_tokenizer("another")
        assert client.scorer.predictor is None


async def test_a_swap_drops_a_predictor_of_another_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router refuses the new predictor too, which is of the same other tokenizer."""
    monkeypatch.setattr(PromptTokenizer, "fingerprint", AsyncMock(return_value="another"))
    async with running_app() as app:
        scorer = app.router_client.scorer
        scorer.predictor = OnlinePredictor(predictor())
        assert (await app.put("/eldr/predictor", KEY, content=FILE)).status_code == 400
        assert (scorer.tokenizer, scorer.predictor) == ("another", None)


async def test_a_predictor_needs_the_admin_key_and_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakeActor()
    async with running_app(actor=actor) as app:
        answer = await app.put("/eldr/predictor", KEY, content=FILE)
        assert answer.status_code == 400
        assert "tokenizer of" in answer.json()["error"]["message"]  # this service cannot read a tokenizer
        monkeypatch.setattr(PromptTokenizer, "fingerprint", AsyncMock(return_value="t"))
        assert (await app.put("/eldr/predictor", None, content=FILE)).status_code == 401
        answer = await app.put("/eldr/predictor", KEY, content=b"nonsense")
        assert answer.status_code == 400
        assert actor.state.settings.predictor is None
        answer = await app.put("/eldr/predictor", KEY, content=FILE)
        assert answer.json()["predictor_version"] == 1
        assert (await app.status())["predictor"]["version"] == 1


def test_a_request_with_predicted_counts_is_placed_by_the_table() -> None:
    state = router_state(predictor=FILE)
    assert place_one(state, "a", 1, predicted=True).worker == "r1"
    assert state.counters["counts_predicted"] == 1
