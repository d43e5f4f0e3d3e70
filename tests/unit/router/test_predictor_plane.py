"""Placement by predicted signatures, and what becomes of the true ones."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_fleet import Sent, answering
from ingress_app import KEY, running_app
from one_path import COUNTS, World, asking
from router_talk import FakeActor, all_is_over, ask, connected, loads, make, say, settled
from tables import request

from eldr_serve.engine.vllm import prompt_counts
from eldr_serve.errors import SwapRefused
from eldr_serve.experts.online_predictor import OnlinePredictor
from eldr_serve.experts.signature import pack_counts
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.pipeline.engines import Engines
from eldr_serve.pipeline.path import RequestPath
from eldr_serve.pipeline.prompt_tokens import PromptTokens
from eldr_serve.replicas import measured_counts
from eldr_serve.router import settings_check
from eldr_serve.router.directory import BLOCK_TOKENS
from eldr_serve.router.messages import Report
from eldr_serve.router.state import RouterState
from eldr_serve.scheduling import MarginalCost, prompt_blocks
from eldr_serve.scheduling.activation import levels_of

L, E, K, V = 2, 8, 2, 16
IDS = np.array([1, 1, 3], np.uint32)


def predictor(**changes: Any) -> SignaturePredictor:
    """Token t makes expert t % E of each layer likelier."""
    experts = np.linalg.qr(np.random.default_rng(0).normal(size=(L * E, E)))[0].T.reshape(E, L, E)
    towards = np.tile(np.eye(E)[:, None] - 1 / E, (1, L, 1)).reshape(E, -1)
    tokens = np.tile(towards @ experts.reshape(E, -1).T, (V // E, 1))
    arrays = np.full((L, E), K / E), tokens, experts, np.ones(V)
    made = SignaturePredictor("m", "t", K, *(np.ascontiguousarray(a, np.float32) for a in arrays))
    return replace(made, **changes)


FILE = predictor().to_bytes()


def counts(token: int, tokens: int = 3) -> np.ndarray:
    """uint32[L,E] of a prompt of that token alone."""
    found = np.zeros((L, E), np.uint32)
    found[:, [token % E, (token + 1) % E]] = tokens
    return found


def with_predictor(**options: Any) -> FakeActor:
    return FakeActor(policy="marginal-cost", table=None, predictor=FILE, **options)


def held(actor: FakeActor) -> dict[str, tuple[int, Any]]:
    policy = actor.state.placer.policy
    assert isinstance(policy, MarginalCost)
    return policy.active.held


# -- the router ------------------------------------------------------------------------------------


def test_a_predictor_is_swapped_and_one_that_does_not_fit_is_refused_and_the_old_one_stays() -> None:
    state = make(table=None, policy="marginal-cost")
    state.expect_counts(L, E)
    assert state.status()["predictor"] is None
    live = state.swap_predictor(FILE, "t")
    assert (live.predictor, live.predictor_version) == (FILE, 1)
    narrow = predictor(
        mean=np.full((L, E // 2), 2 * K / E, np.float32), experts=np.zeros((0, L, E // 2), np.float32),
        tokens=np.zeros((V, 0), np.float32),
    )  # fmt: skip
    for bad, tokenizer, word in (
        (b"nonsense", "t", "not an eldr-serve file"),
        (predictor(model="n").to_bytes(), "t", "model n, not m"),
        (FILE, "u", "tokenizer t, not u"),
        (narrow.to_bytes(), "t", "layers and experts"),
    ):
        with pytest.raises(SwapRefused, match=word) as refused:
            state.swap_predictor(bad, tokenizer)
        assert "\n" not in str(refused.value)
        assert state.settings is live
    with pytest.raises(SwapRefused, match="model n"):
        RouterState(model_id="m", policy="marginal-cost", predictor=predictor(model="n").to_bytes())


def test_what_does_not_fit_in_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_check, "MAX_SETTINGS_BYTES", len(FILE))
    state = make(table=3, policy="marginal-cost")
    with pytest.raises(SwapRefused, match="MiB together"):
        state.swap_predictor(FILE, "t")
    assert state.settings.predictor is None


def test_true_counts_take_the_place_of_predicted_ones_in_load_and_policy() -> None:
    state = make(workers=2, table=None, policy="marginal-cost")
    predicted = request("a", 3, expert_counts=counts(1).astype(np.float16), predicted=True)
    lease = say(state, predicted)[0]
    say(state, progress={"a": 4})
    say(state, counted=(request("a", 30, expert_counts=counts(5, 30)), request("gone", 7)))
    assert loads(state)[lease.replica] == (1, 34)
    policy = state.placer.policy
    assert isinstance(policy, MarginalCost)
    slot, levels = policy.active.held["a"]
    assert slot == lease.position
    np.testing.assert_array_equal(levels, levels_of((counts(5).reshape(-1) / 3).astype(np.float32)))
    counted = {name: state.counters[name] for name in ("signature_predicted", "signatures_returned")}
    assert counted == {"signature_predicted": 1, "signatures_returned": 2}
    say(state, released=("a",))
    assert set(loads(state).values()) == {(0, 0)}
    assert not policy.active.held
    assert not policy.active.depth.any()


def test_status_says_how_well_clients_predict_until_they_are_gone() -> None:
    state = make(table=None, policy="marginal-cost", predictor=FILE, clients="ab")
    for client, prompts, gain, on in (("a", 30, 0.5, True), ("b", 10, -0.5, False)):
        told = {"on": on, "prompts": prompts, "cosine": gain, "gain": gain}
        state.report(client, Report(prediction=told))
    expected = {"version": 1, "clients": 2, "prompts": 40, "on": 1, "cosine": 0.25, "gain": 0.25}
    assert state.status()["predictor"] == expected
    state.drop("b")
    assert state.status()["predictor"]["clients"] == 1
    state.swap_predictor(FILE, "t")
    assert state.status()["predictor"] == {
        "version": 2, "clients": 0, "prompts": 0, "on": 0, "cosine": 0.0, "gain": 0.0,
    }  # fmt: skip


def narrow() -> bytes:
    """A predictor file of half as many experts."""
    return predictor(
        mean=np.full((L, E // 2), 2 * K / E, np.float32), experts=np.zeros((0, L, E // 2), np.float32),
        tokens=np.zeros((V, 0), np.float32),
    ).to_bytes()  # fmt: skip


def test_a_first_predictor_of_another_shape_is_given_up_and_true_counts_are_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = make(table=None, policy="marginal-cost", predictor=narrow())
    wrong = np.full((L, E // 2), 1.0, np.float16)
    say(state, request("a", 3, expert_counts=wrong, predicted=True))
    state.expect_counts(L, E)
    assert state.settings.predictor is None
    assert caplog.messages == [
        f"nothing is predicted: the signature predictor is for layers and experts {(L, E // 2)}, not {(L, E)}"
    ]
    # Of a client that has not heard of it yet.
    say(state, request("b", 3, expert_counts=wrong, predicted=True))
    assert state.counters["signature_missing"] == 1
    say(state, request("c", 3, expert_counts=counts(5)))
    policy = state.placer.policy
    assert isinstance(policy, MarginalCost)
    true = levels_of((counts(5).reshape(-1) / 3).astype(np.float32))
    np.testing.assert_array_equal(policy.active.held["c"][1], true)
    say(state, released=("a", "b", "c"))
    assert set(loads(state).values()) == {(0, 0)}


async def test_a_client_that_knows_the_engines_shape_predicts_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    async with connected(actor, "r0") as client:
        await client.call("expect_counts", L, E)
        actor.state.check.shape = None  # one that has started again
        actor.state.swap_predictor(narrow(), "t")
        await client.place(request("a", 3), None, token_ids=IDS)
        assert client.scorer.predictor is None
        assert "layers and experts" in caplog.text
        client.release("a")
        await all_is_over(client, actor)


def test_a_policy_keeps_what_it_has_learnt_when_the_predictor_alone_is_swapped() -> None:
    state = make(table=None, policy="marginal-cost")
    state.expect_counts(L, E)
    for name, token in (("a", 1), ("b", 5)):
        say(state, request(name, 3, expert_counts=counts(token)))
    policy = state.placer.policy
    state.swap_predictor(FILE, "t")
    assert state.placer.policy is policy
    assert isinstance(policy, MarginalCost)
    assert policy.profiles.profile.any()


# -- its client ------------------------------------------------------------------------------------


async def test_a_prediction_stands_in_for_a_missing_signature_and_the_true_one_is_learnt() -> None:
    actor = with_predictor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), counts(0))  # brings the predictor
        lease = await client.place(request("a", 3), None, token_ids=IDS)
        sent = actor.asked[-1]
        assert sent.predicted
        assert sent.expert_counts.dtype == np.float16  # half of float32's bytes travel
        np.testing.assert_allclose(sent.expert_counts, predictor().predict(IDS), rtol=1e-3)
        assert lease.reason == "marginal-cost"
        assert actor.state.counters["signature_predicted"] == 1
        # Without token ids there is nothing to predict from, and counts need no prediction.
        assert (await client.place(request("b"), None)).reason == "marginal-cost"
        assert actor.state.counters["signature_missing"] == 1
        await client.place(request("c", 3), counts(1), token_ids=IDS)
        assert not actor.asked[-1].predicted
        assert client.scorer.predictor is not None
        assert client.scorer.predictor.prompts == 1
        for name in ("first", "a", "b", "c"):
            client.release(name)
        await all_is_over(client, actor)


async def test_what_an_engine_counted_reaches_the_router_and_the_one_after_it() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    actor.state.swap_predictor(FILE, "t")
    async with connected(actor, "r0", "r1", timeout_s=0.1) as client:
        await client.place(request("first"), counts(0))
        await client.place(request("a", 3), None, token_ids=IDS)
        client.counted("a", IDS, counts(5, 40), 40)
        client.counted("gone", IDS, counts(5, 40), 40)
        await settled(lambda: actor.state.counters["signatures_returned"] == 1)
        true = levels_of(counts(5, 1).reshape(-1).astype(np.float32))
        np.testing.assert_array_equal(held(actor)["a"][1], true)
        assert actor.running["a"].request.prompt_tokens == 40
        assert client.scorer.predictor is not None
        assert client.scorer.predictor.prompts == 2
        await settled(lambda: (actor.state.prediction or {})["prompts"] == 2)
        actor.alive = False
        client.release("first")
        await settled(lambda: client.router_away)
        actor.restart()
        await settled(lambda: not client.router_away and "a" in actor.running)
        np.testing.assert_array_equal(held(actor)["a"][1], true)
        assert actor.state.settings.predictor == FILE
        assert client.scorer.predictor.prompts == 2  # what it has learnt is not lost
        client.release("a")
        await all_is_over(client, actor)


async def test_counts_of_a_message_that_was_not_delivered_are_told_again_to_the_same_actor() -> None:
    actor = with_predictor()
    async with connected(actor, "r0", "r1") as client:
        await client.place(request("first"), counts(0))
        await client.place(request("a", 3), None, token_ids=IDS)
        actor.alive = False
        client.counted("a", IDS, counts(5, 40), 40)
        await settled(lambda: client.router_away)
        assert actor.running["a"].request.predicted
        actor.alive = True
        await settled(lambda: not actor.running["a"].request.predicted)
        assert actor.running["a"].request.prompt_tokens == 40
        for name in ("first", "a"):
            client.release(name)
        await all_is_over(client, actor)


async def test_a_predictor_that_is_worse_than_the_mean_is_not_asked_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = with_predictor()
    async with connected(actor, "r0") as client:
        await client.place(request("first"), counts(0))
        assert client.scorer.predictor is not None
        rng = np.random.default_rng(0)
        with caplog.at_level(logging.WARNING):
            for _ in range(80):  # whose experts have nothing to do with their tokens
                ids = np.full(3, rng.integers(V), np.uint32)
                client.counted("gone", ids, counts(int(rng.integers(E))), 3)
        assert not client.scorer.predictor.on
        assert "the signature predictor is off" in caplog.text
        await client.place(request("a", 3), None, token_ids=IDS)
        sent = actor.asked[-1]
        assert sent.signature_missing
        assert not sent.predicted
        await settled(lambda: (actor.state.prediction or {})["on"] == 0)
        for name in ("first", "a"):
            client.release(name)
        await all_is_over(client, actor)


async def test_a_predictor_of_another_shape_or_tokenizer_is_given_up_and_nothing_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = with_predictor()
    async with connected(actor, "r0") as client:
        client.scorer.tokenizer = "another"
        await client.place(request("a", 3), None, token_ids=IDS)
        assert client.scorer.predictor is None
        assert "tokenizer t, not another" in caplog.text
        client.scorer.predictor = OnlinePredictor(predictor())
        await client.place(request("b", 3), counts(1)[:1], token_ids=IDS)
        assert client.scorer.predictor is None
        assert "cannot be used" in caplog.text
        for name in "ab":
            client.release(name)
        await all_is_over(client, actor)


# -- the path over whole engines ---------------------------------------------------------------------


async def whole_engine(sent: Sent) -> Any:
    """Says its prompt's counts before its first token, and then goes on."""
    if sent.method == measured_counts.METHOD:
        yield msgspec.msgpack.encode((9, pack_counts(COUNTS)))
        return
    for _ in range(50):  # turns of the loop
        await asyncio.sleep(0)
    for token in (b"a", b"b"):
        yield token


def whole_world(decode: Any = whole_engine) -> World:
    world = World(decode=decode)
    fleets: Any = world.prefill, world.decode
    tokens: Any = PromptTokens("")
    world.path = RequestPath(
        engines=Engines(*fleets, whole=True), client=world.client, options=world.path._options, tokens=tokens
    )
    return world


async def test_a_whole_engine_is_sent_the_request_as_it_is_and_says_what_the_prompt_uses() -> None:
    world = whole_world()
    assert await world.run(prompt=[5, 6, 7]) == b"ab"
    assert not world.prefill.requests
    ((placement, given),) = world.client.placed
    assert (placement.prompt_tokens, given) == (3, None)
    assert world.client.placed_by[0].tolist() == [5, 6, 7]
    asked, sent = world.decode.requests
    assert (asked.method, sent.method) == (measured_counts.METHOD, "generate")
    assert asked.replica == sent.replica == "d0"
    assert sent.header["id"] == asked.header["id"]  # asked before the prompt is sent, by the same name
    assert not sent.header["token_ids"]  # the engine's template is its own business
    ((name, ids, found, tokens),) = world.client.counts
    assert name == placement.request_id
    assert (ids.tolist(), tokens) == ([5, 6, 7], 9)
    np.testing.assert_array_equal(found, COUNTS)


async def test_the_blocks_of_a_prompt_go_with_it_where_decode_engines_prefill() -> None:
    world = whole_world()
    world.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}, "d1": {}})
    ids = list(range(7))

    async def hashes(path: RequestPath = world.path, **fields: Any) -> list[int]:
        context = asking(prompt=ids, cache_salt=fields.pop("own", None))
        context.request = replace(context.request, **fields)
        async for _ in path.generate(context):
            pass
        found = world.client.placed[-1][0].blocks
        assert found.block_tokens == 2
        return list(found.hashes.tolist())

    mine = await hashes()
    assert mine == prompt_blocks(np.array(ids, np.uint32), 2).hashes.tolist()
    assert len(mine) == 3
    of_tenant, of_user = await hashes(cache_salt="tenant"), await hashes(own="user")
    assert len({*mine, *of_tenant, *of_user}) == 9
    assert await hashes(cache_salt="tenant", own="user") == of_tenant  # the tenant's has the user's in it
    await world.run(prompt=["a", "b"], n=2)
    assert world.client.placed[-1][0].blocks is None  # its ids are not known
    split = World()
    split.decode.directory.publish({"d0": {BLOCK_TOKENS: 2}})
    await split.run(prompt=ids)
    assert split.client.placed[-1][0].blocks is None  # another engine prefills


async def test_the_router_learns_what_was_sent_where_and_its_successor_does_too() -> None:
    actor = FakeActor(policy="marginal-cost", table=None)
    prompt = prompt_blocks(np.arange(40, dtype=np.uint32), 4)
    async with connected(actor, "r0", "r1", timeout_s=0.1) as client:
        first = await client.place(request("a", 40, blocks=prompt), None, token_ids=IDS)
        assert first.replica in ("r0", "r1")
        client.counted("a", IDS, counts(5, 41), 41)
        await settled(lambda: actor.state.counters["signatures_returned"] == 1)
        assert actor.messages[-1].request.blocks is None  # they were told before
        known = actor.state.placer.prefixes
        assert known.cached_tokens([first.replica], prompt).tolist() == [36]
        actor.alive = False
        client.release("gone")
        client.count("anything")
        await settled(lambda: client.router_away)
        actor.restart()
        await settled(lambda: not client.router_away and "a" in actor.running)
        known = actor.state.placer.prefixes
        assert known.cached_tokens([first.replica], prompt).tolist() == [36]
        client.release("a")
        await all_is_over(client, actor)


async def test_a_prompt_without_token_ids_is_served_by_load() -> None:
    world = whole_world()
    assert await world.run(prompt=["a", "b"], n=2) == b"ab"
    (sent,) = world.decode.requests
    assert (sent.method, sent.kv) == ("generate", {})
    assert world.client.placed[0][0].prompt_tokens == 0


async def test_an_engine_that_counts_nothing_or_is_lost_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_counts, "_LATER_S", 0.001)

    async def silent(sent: Sent) -> Any:
        if sent.method == measured_counts.METHOD:
            await asyncio.sleep(60)
        elif sent.replica == "d0":
            raise RuntimeError("no memory")
        yield b"x"

    world = whole_world(silent)
    assert await world.run(prompt=[5]) == b"x"
    assert [sent.replica for sent in world.decode.requests] == ["d0", "d0", "d1", "d1"]
    assert not world.client.counts
    await settled(lambda: not any(world.decode.in_flight.values()))  # nobody waits for it any more


async def test_a_client_that_goes_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_counts, "_LATER_S", 0.001)
    world = whole_world(answering(b"a", asyncio.Event()))
    stream = world.path.generate(asking(prompt=[1, 2]))
    await anext(stream)
    await stream.aclose()
    await settled(lambda: not any(world.decode.in_flight.values()))
    assert not world.client.held


async def test_the_engines_end_answers_whoever_asked_first_and_forgets_the_rest() -> None:
    asking, gone = (asyncio.create_task(prompt_counts.wait_for(name)) for name in "ab")
    await asyncio.sleep(0)
    assert [prompt_counts.is_awaited(name) for name in "abc"] == [True, True, False]
    gone.cancel()
    await asyncio.to_thread(prompt_counts.put, {"a": (9, "packed"), "b": (1, "late"), "c": (1, "unasked")})
    assert await asking == (9, "packed")
    assert not prompt_counts._waiting


async def test_an_ingress_that_hears_of_a_predictor_reads_prompts_by_the_models_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one was told of it."""

    async def fingerprint(self: PromptTokens) -> str:
        return "t"

    monkeypatch.setattr(PromptTokens, "fingerprint", fingerprint)
    actor = FakeActor(policy="marginal-cost", table=None)
    async with running_app(actor=actor) as app:
        client = app.ingress._client
        assert client.scorer.tokenizer is None
        actor.state.swap_predictor(FILE, "t")
        body = {"model": "m", "prompt": "hello", "max_tokens": 2}
        assert (await app.post("/v1/completions", body)).status_code == 200
        await settled(lambda: client.scorer.tokenizer == "t")
        client.scorer.predictor = OnlinePredictor(predictor())
        client.scorer.tokenised_by("t")
        assert client.scorer.predictor is not None
        client.scorer.tokenised_by("another")
        assert client.scorer.predictor is None


# -- HTTP --------------------------------------------------------------------------------------------


async def test_a_predictor_is_put_by_the_operator_alone_and_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fingerprint(self: PromptTokens) -> str:
        return "t"

    actor = FakeActor()
    async with running_app(actor=actor) as app:
        answer = await app.put("/eldr/predictor", KEY, content=FILE)
        assert answer.status_code == 400
        assert "tokenizer of" in answer.json()["error"]["message"]  # this service has none that can be read
        monkeypatch.setattr(PromptTokens, "fingerprint", fingerprint)
        assert (await app.put("/eldr/predictor", None, content=FILE)).status_code == 401
        answer = await app.put("/eldr/predictor", KEY, content=b"nonsense")
        assert answer.status_code == 400
        assert actor.state.settings.predictor is None
        answer = await app.put("/eldr/predictor", KEY, content=FILE)
        assert answer.json()["predictor_version"] == 1
        assert (await app.status())["predictor"]["version"] == 1


def test_a_request_with_a_predicted_signature_is_placed_by_a_table_too() -> None:
    state = make(predictor=FILE)
    assert ask(state, "a", 1, predicted=True).replica == "r1"
    assert state.counters["signature_predicted"] == 1
