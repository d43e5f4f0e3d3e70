"""Moves of experts between real gloo ranks: the weights match the placement map after every slice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from benchmarks.lib.ep.ranks import run_on_ranks
from eldr_serve.engine.vllm.ep import live as live_module
from eldr_serve.engine.vllm.ep import transfer as transfer_module
from eldr_serve.engine.vllm.ep.layer import LOG_SIZE, LayerExperts
from eldr_serve.engine.vllm.ep.live import LiveExperts
from eldr_serve.engine.vllm.ep.swap import EngineExperts, ExpertPlacementError, swap_placement
from eldr_serve.engine.vllm.experts_config import CpuExpertsConfig
from eldr_serve.errors import RequestRefusedError
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology, placement_id

LAYERS, EXPERTS, SLOTS, MAX_MOVED = 2, 6, 8, 2


def live_experts(rank: int = 0, ranks: int = 1) -> LiveExperts:
    """Return experts with two weights each: 100 times the layer plus the expert's id, and half of that."""
    layers = []
    for layer in range(LAYERS):
        weight = torch.full((SLOTS // ranks, 2, 3), -1.0)
        first = EXPERTS // ranks
        weight[:first] = 100.0 * layer + torch.arange(rank * first, (rank + 1) * first)[:, None, None]
        layers.append(
            LayerExperts(
                [weight, (weight[:, 0] / 2).bfloat16()],
                slots=SLOTS,
                num_experts=EXPERTS,
                topology=Topology(ranks=ranks),
                rank=rank,
                rule="even",
            )
        )
    return LiveExperts(layers, MAX_MOVED, dist.group.WORLD)


def placements(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        np.stack([rng.permutation([*range(EXPERTS), *rng.integers(EXPERTS, size=2)]) for _ in range(LAYERS)])
        for _ in range(8)
    ]


def move_through_placements(rank: int, ranks: int) -> int:
    """Move through several placements, and return the bytes received from other ranks."""
    experts = live_experts(rank, ranks)
    for placement in placements(3):
        slices = experts.begin(placement, ranks)
        for slices_left in range(slices - 1, -1, -1):
            assert experts.move() == slices_left
            check_weights(experts, rank, ranks)
        by_rank = np.sort(placement.reshape(LAYERS, ranks, -1))
        assert np.array_equal(np.sort(experts.placement().reshape(LAYERS, ranks, -1)), by_rank)
    status = experts.status()
    assert status["experts_moved"] > 0
    assert status["slices_left"] == 0
    return int(status["bytes_received"])


def check_weights(experts: LiveExperts, rank: int, ranks: int) -> None:
    local = experts.placement().reshape(LAYERS, ranks, -1)[:, rank]
    for number, layer in enumerate(experts._layers.values()):
        is_filled = local[number] >= 0
        weights = torch.from_numpy(100.0 * number + local[number][is_filled])
        assert torch.equal(layer.weights[0][is_filled, 1, 2].double(), weights)
        assert torch.equal(layer.weights[1][is_filled, 0], (weights / 2).bfloat16())


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_move_with_the_map(ranks: int) -> None:
    received = run_on_ranks(ranks, move_through_placements, ranks)
    expert = 2 * 3 * 4 + 3 * 2
    assert all(count % expert == 0 for count in received)
    assert all(count > 0 for count in received) == (ranks > 1)


def call_on(experts: LiveExperts) -> Any:
    """Return `collective_rpc` of an engine with one rank."""

    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        assert method == "eldr_experts"
        await asyncio.sleep(0)
        try:
            return [getattr(experts, args[0])(*args[1:])]
        except ValueError as error:
            return [str(error)]

    return call


def pause_first_move(call: Any, begun: asyncio.Event, go_on: asyncio.Event | None = None) -> Any:
    """Return `call`, but let the first move wait for `go_on`; None: for ever."""

    async def call_and_pause(method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = await call(method, args)
        if args[0] == "move":
            begun.set()
            await (go_on or asyncio.Event()).wait()
        return answers

    return call_and_pause


def placement_of(rows: np.ndarray, ranks: int = 1) -> ExpertPlacement:
    return ExpertPlacement(rows, ranks, int(rows.max()) + 1, model="tiny", method="by hand")


@pytest.fixture
def single_rank(tmp_path: Any) -> Any:
    """Provide a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


async def test_a_swap_returns_its_cost_to_the_client(single_rank: None) -> None:
    experts, target = live_experts(), placements(5)[0]
    swapped = await swap_placement(call_on(experts), placement_of(target))
    assert swapped.experts == experts.status()["experts_moved"] > 0
    assert swapped.slices >= swapped.experts / MAX_MOVED
    assert swapped.received_bytes == 0
    assert np.array_equal(np.sort(experts.placement()), np.sort(target))


def test_ranks_that_are_not_called_together_refuse_changes(single_rank: None) -> None:
    experts = LiveExperts(
        [*live_experts()._layers.values()], MAX_MOVED, dist.group.WORLD, called_together=False
    )
    for change in (lambda: experts.begin(placements(5)[0], 1), lambda: experts.choose("metro")):
        with pytest.raises(ValueError, match="cannot change their experts while they serve"):
            change()
    assert experts.status()["slices_left"] == 0


async def test_a_placement_that_does_not_fit_changes_nothing(single_rank: None) -> None:
    experts = live_experts()
    before = experts.status()
    good = placements(5)[0]
    for placement, sentence in (
        (placement_of(good[:1]), "1 layers of 8 slots, but the model has 2 of 8"),
        (placement_of(good[:, :6] * 0), "2 layers of 6 slots"),
        (placement_of(np.tile(np.arange(SLOTS), (LAYERS, 1))), "outside 0 to 5"),
        (placement_of(np.minimum(good, 4)), "expert 5 of layer 0 has no slot"),
        (placement_of(good, ranks=2), "for 2 ranks, but the engine has 1"),
    ):
        with pytest.raises(ExpertPlacementError, match=sentence):
            await swap_placement(call_on(experts), placement)
        assert experts.status() == before
    with pytest.raises(ValueError, match="the load has shape"):
        experts.begin(good, 1, [[1.0]])
    with pytest.raises(ValueError, match="unknown replica choice 'best'"):
        experts.choose("best")
    assert experts.status() == before


async def test_one_swap_runs_at_a_time_and_a_cancelled_one_stops_where_it_is(single_rank: None) -> None:
    experts, moved = live_experts(), asyncio.Event()
    call = call_on(experts)
    first = asyncio.create_task(swap_placement(pause_first_move(call, moved), placement_of(placements(5)[0])))
    await moved.wait()
    under_way = experts.status()
    assert under_way["slices_left"]
    with pytest.raises(ExpertPlacementError, match=r"under way: \d+ slices to come"):
        await swap_placement(call, placement_of(placements(5)[1]))
    assert experts.status() == under_way
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert experts.status()["slices_left"] == 0
    check_weights(experts, 0, 1)
    await swap_placement(call, placement_of(placements(5)[1]))


async def test_a_swap_that_is_cancelled_during_planning_leaves_no_swap_running(single_rank: None) -> None:
    experts, begun, go_on = live_experts(), asyncio.Event(), asyncio.Event()
    before, call = experts.placement(), call_on(experts)
    calls: list[asyncio.Future[list[Any]]] = []

    async def answered(method: str, args: tuple[Any, ...]) -> list[Any]:
        if args[0] == "begin":
            begun.set()
            await go_on.wait()
        return await call(method, args)

    async def slow(method: str, args: tuple[Any, ...]) -> list[Any]:
        """Complete the call even if the caller is cancelled, as an engine does."""
        calls.append(asyncio.ensure_future(answered(method, args)))
        return await asyncio.shield(calls[-1])

    swap = asyncio.create_task(swap_placement(slow, placement_of(placements(5)[0])))
    await begun.wait()
    swap.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await swap
    await asyncio.gather(*calls)
    assert experts.status()["slices_left"] == 0
    assert np.array_equal(experts.placement(), before)
    await swap_placement(call, placement_of(placements(5)[0]))


async def test_an_engine_reports_its_ranks_experts_and_refuses_concurrent_swaps(single_rank: None) -> None:
    experts, began, go_on = live_experts(), asyncio.Event(), asyncio.Event()
    engine, target = (
        EngineExperts(pause_first_move(call_on(experts), began, go_on)),
        placement_of(placements(5)[0]),
    )
    await engine.refresh()
    before = engine.status
    assert before["placement"] == placement_id(experts.placement(), 1) != target.id
    assert before["replica_bytes"] * EXPERTS == before["weight_bytes"] * (SLOTS - EXPERTS)
    with pytest.raises(RequestRefusedError, match="for 2 ranks") as refused:
        await engine.place(placement_of(placements(5)[0], ranks=2))
    assert refused.value.status == 400
    assert engine.status == before
    swap = asyncio.create_task(engine.place(target))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefusedError, match=r"under way$"):  # it is planned and has no slices yet
        await engine.place(placement_of(placements(5)[1]))
    await began.wait()
    with pytest.raises(RequestRefusedError, match=r"under way: \d+ slices to come") as refused:
        await engine.place(placement_of(placements(5)[1]))
    assert refused.value.status == 409
    go_on.set()
    took = await swap
    assert engine.status["slices_left"] == 0
    assert engine.status["placement"] == took["placement"] == target.id
    assert engine.status["experts_moved"] == took["experts"] > 0


async def test_an_engine_reports_its_experts_after_a_cancelled_swap(single_rank: None) -> None:
    experts, moved = live_experts(), asyncio.Event()
    engine, target = EngineExperts(pause_first_move(call_on(experts), moved)), placement_of(placements(5)[0])
    await engine.refresh()
    before = engine.status["placement"]
    swap = asyncio.create_task(engine.place(target))
    await moved.wait()
    swap.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swap
    assert engine.status["placement"] == placement_id(experts.placement(), 1)
    assert engine.status["placement"] not in (before, target.id)
    assert engine.status["slices_left"] == 0
    assert engine.status["experts_moved"] == MAX_MOVED


async def test_an_engine_without_our_ranks_refuses_swaps() -> None:
    async def call(method: str, args: tuple[Any, ...]) -> list[Any]:
        return ["this engine's experts cannot be moved"]

    with pytest.raises(RequestRefusedError, match="cannot be moved"):
        await EngineExperts(call).refresh()


def test_slots_can_be_left_empty(single_rank: None) -> None:
    experts = live_experts()
    full, bare = (
        np.tile([0, 1, 2, 3, 4, 5, 0, 1], (LAYERS, 1)),
        np.tile([5, 4, 3, -1, 2, 1, -1, 0], (LAYERS, 1)),
    )
    for rows in (full, bare, full, bare):
        slices_left, moved = experts.begin(rows, 1), experts.status()["experts_moved"]
        while slices_left:
            slices_left = experts.move()
            check_weights(experts, 0, 1)
        assert np.array_equal(np.sort(experts.placement()), np.sort(rows))
        assert (experts.status()["experts_moved"] == moved) == (rows is bare)  # emptying a slot needs no copy
    with pytest.raises(ValueError, match="expert 5 of layer 0 has no slot"):
        experts.begin(np.where(bare == 5, -1, bare).clip(-1, 4), 1)


async def test_a_swap_without_loads_keeps_the_previous_loads(single_rank: None) -> None:
    experts, load = live_experts(), np.arange(12.0).reshape(LAYERS, EXPERTS)
    await swap_placement(call_on(experts), placement_of(placements(5)[0]), load)
    await swap_placement(call_on(experts), placement_of(placements(5)[1]))
    for number, layer in experts._layers.items():
        assert np.array_equal(np.asarray(layer.load), load[number])


def test_a_rank_that_cannot_move_exits(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = live_experts()
    before = experts.placement()
    monkeypatch.setattr(live_module, "transfer", lambda *_: 1 / 0)
    experts.begin(placements(5)[0], 1)
    with pytest.raises(SystemExit, match="could not be moved"):
        experts.move()
    assert np.array_equal(experts.placement(), before)


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, None), (7, None), (16, None), (7, [0, 5, 2]), (16, [16, 0, 0]), (0, [0, 0, 0])]
)
def test_the_tokens_that_a_rank_serves_are_recorded(tokens: int, sizes: list[int] | None) -> None:
    """Compare with brute force: 3 ranks hold equal blocks of the batch's tokens, or those of given sizes."""
    ranks, rng = 3, np.random.default_rng(tokens)
    homes = [token * ranks // tokens for token in range(tokens)]
    if sizes is not None:
        homes = np.repeat(range(ranks), sizes).tolist()
    batch = np.array([rng.choice(EXPERTS, 3, replace=False) for _ in range(tokens)], int).reshape(-1, 3)
    for rank in range(ranks):
        layer = LayerExperts(
            [torch.zeros(3, 1)],
            slots=9,
            num_experts=EXPERTS,
            topology=Topology(ranks=ranks),
            rank=rank,
            rule="metro",
        )
        layer.set_placement(np.array([0, 1, 2, 2, 3, 4, 4, 5, 0]))
        here = layer.route_and_log(torch.from_numpy(batch), sizes).numpy() >= 0
        at_home = np.array(homes, int) == rank
        logged = layer.log[0].tolist()
        assert logged[0] == tokens
        assert logged[2:] == [here.sum(), here[at_home].sum(), here[~at_home].any(axis=1).sum()]
        assert logged[1] == len(set(batch[here]))


def test_large_batches_can_have_another_replica_choice() -> None:
    """With METRO one rank serves all tokens of an expert; with the even spread both ranks serve some."""
    experts = torch.zeros(8, 1, dtype=torch.int32)
    for prefill_rule, num_ranks_with_work in (("even", 2), (None, 1)):
        served = []
        for rank in range(2):
            layer = LayerExperts(
                [torch.zeros(2, 1)],
                slots=4,
                num_experts=2,
                topology=Topology(ranks=2),
                rank=rank,
                rule="metro",
                prefill_rule=prefill_rule,
                max_decode_tokens=4,
            )
            layer.set_placement(np.array([0, 1, 1, 0]))
            served.append([(layer.route_and_log(experts[:tokens]) >= 0).sum().item() for tokens in (4, 5, 8)])
        pairs = np.array(served)
        assert pairs.sum(axis=0).tolist() == [4, 5, 8]
        assert (pairs > 0).sum(axis=0).tolist() == [1, num_ranks_with_work, num_ranks_with_work]


def test_the_expected_load_of_a_placement_reaches_the_replica_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both ranks hold expert 0. Rank 1, which expects 2 tokens and not 101, serves most tokens of it."""
    rows, load = np.array([[0, 1, 2, 0, 3, 3]]), np.array([[2.0, 50.0, 50.0, 1.0]])
    placement = ExpertPlacement(rows, 2, 4, model="tiny", method="by hand", expected_tokens=load)
    placement.save(tmp_path / "placement.json")
    # There is no other rank, so no weights move.
    monkeypatch.setattr(transfer_module, "transfer", lambda layers, *_: layers[0].set_placement(rows[0]))
    layer = transfer_module.start_layer(
        [torch.nn.Parameter(torch.zeros(2, 3))],
        CpuExpertsConfig(placement=tmp_path / "placement.json", replica_choice="weighted"),
        layer=0,
        num_layers=1,
        num_experts=4,
        topology=Topology(ranks=2),
        rank=0,
        group=None,
        max_decode_tokens=8,
    )
    served = layer.route_and_log(torch.zeros(100, 1, dtype=torch.int32)) >= 0
    assert served.sum() < 10  # 37 if all loads were equal


async def test_batches_are_reported_once_and_the_oldest_are_dropped(single_rank: None) -> None:
    experts = live_experts()
    await swap_placement(call_on(experts), placement_of(np.tile([0, 1, 2, 3, 4, 5, 0, 1], (LAYERS, 1))))
    for layer in experts._layers.values():
        for tokens in range(1, LOG_SIZE + 3):
            layer.route_and_log(torch.zeros(min(tokens, 4), 2, dtype=torch.int32))
    end, batches = experts.batches(0)
    assert (end, len(batches)) == (LOG_SIZE + 2, LOG_SIZE)
    # 4 tokens, both replicas of expert 0, 8 pairs, all at home
    assert batches[-1] == [[4, 2, 8, 8, 0]] * LAYERS
    assert experts.routed() == [[2 * (1 + 2 + 3) + 8 * (LOG_SIZE - 1), 0, 0, 0, 0, 0]] * LAYERS
    assert experts.batches(end) == (end, [])
    assert len(experts.batches(end - 2)[1]) == 2
