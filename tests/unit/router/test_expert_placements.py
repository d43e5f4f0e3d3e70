"""The expert placements of a deployment: files, fit to the table, and which placement a position gets."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eldr_serve.engine.experts_change import ExpertsChange
from eldr_serve.router.actor import DecodeRouter
from eldr_serve.router.settings import RouterSettings
from eldr_serve.router_protocol.messages import Restore
from eldr_serve.validation import first_problem
from tests.support.tables import save_placements, unit_table


def settings(folder: Path, table: int | None = 3, **fields: Any) -> RouterSettings:
    content = None if table is None else unit_table(table).to_bytes()
    return RouterSettings(model_id="m", table=content, expert_placements=folder, **fields)


def test_a_folder_is_read_where_the_application_is_built(tmp_path: Path) -> None:
    placements = save_placements(tmp_path, range(3))
    (tmp_path / "placement.0.vllm.jsonl").write_text("another format")
    parsed = [ExpertsChange.parse(body)[1] for body in settings(tmp_path).expert_placements]
    assert [placement.id for placement in parsed] == [placement.id for placement in placements]
    assert len({placement.id for placement in placements}) == 3
    first = settings(tmp_path)
    assert RouterSettings(**dict(first)) == first
    assert RouterSettings(expert_placements=None).expert_placements == ()
    assert settings(tmp_path).fingerprint == first.fingerprint
    assert settings(tmp_path).fingerprint != RouterSettings(model_id="m", table=first.table).fingerprint


@pytest.mark.parametrize(
    ("positions", "other", "words"),
    [
        ([], {}, "has no expert placement NAME.0.json"),
        ([0, 2], {}, "has no expert placement of position 1"),
        ([0, 1], {}, "there are 2 expert placements, but the table has 3 clusters"),
        ([0, 1, 2, 3], {}, "there are 4 expert placements, but the table has 3 clusters"),
        (
            [0, 1],
            {"num_layers": 3},
            "position 2 is for m with 3 x 8 experts, but the table is for m with 2 x 8",
        ),
        (
            [0, 1],
            {"num_experts": 16},
            "position 2 is for m with 2 x 16 experts, but the table is for m with 2 x 8",
        ),
        ([0, 1], {"model": "n"}, "position 2 is for n with 2 x 8 experts, but the table is for m with 2 x 8"),
        ([0, 1], {"ranks": 4}, "position 2 has 8 slots on 4 ranks, but position 0 has 8 slots on 2"),
        ([0, 1], {"redundant": 2}, "position 2 has 10 slots on 2 ranks, but position 0 has 8 slots on 2"),
    ],
)
def test_a_set_that_does_not_fit_is_refused_in_one_sentence(
    positions: list[int], other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_placements(tmp_path, positions)
    if other:
        save_placements(tmp_path, [2], **other)
    with pytest.raises(ValidationError) as refused:
        settings(tmp_path)
    sentence = first_problem(refused.value, None)
    assert words in sentence
    assert "\n" not in sentence


def test_two_placements_of_a_position_or_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="not a folder of expert placements"):
        settings(tmp_path / "none")
    save_placements(tmp_path, range(3))
    save_placements(tmp_path, [1])[0].save(tmp_path / "other.1.json")
    with pytest.raises(ValidationError, match="has two placements of position 1"):
        settings(tmp_path)
    with pytest.raises(ValidationError, match="must be a folder"):
        RouterSettings(expert_placements=["placement.0.json"])


def test_placements_need_the_table_of_their_clusters(tmp_path: Path) -> None:
    save_placements(tmp_path, range(3))
    with pytest.raises(ValidationError, match="expert_placements needs `table`"):
        settings(tmp_path, table=None)


async def test_a_replica_that_takes_a_vacant_position_gets_its_placement(tmp_path: Path) -> None:
    save_placements(tmp_path, range(3))
    deployed = settings(tmp_path)
    router = DecodeRouter(deployed)
    router._state.restore_from_ingress(Restore("c", ("r0", "r1", "r2")))
    for position, body in enumerate(deployed.expert_placements):
        answer = await router.expert_placement_of_position(f"r{position}", "")
        assert answer is not None
        assert (answer.position, answer.body) == (position, body)
        again = await router.expert_placement_of_position(f"r{position}", answer.digest)
        assert again is not None
        assert again == answer._replace(body=None)
    assert await router.expert_placement_of_position("new", "") is None  # no ingress can reach it yet
    router._state.ingresses.set_reachable_workers("c", ["r0", "r2"])
    assert await router.expert_placement_of_position("r1", "") is None
    router._state.ingresses.set_reachable_workers("c", ["r0", "r2", "new"])
    answer = await router.expert_placement_of_position("new", "")
    assert answer is not None
    assert (answer.position, answer.body) == (1, deployed.expert_placements[1])
    # As with centroids, a fourth worker shares those of position 0.
    router._state.ingresses.set_reachable_workers("c", ["r0", "r2", "new", "more"])
    more = await router.expert_placement_of_position("more", "")
    assert more is not None
    assert (more.position, more.body) == (3, deployed.expert_placements[0])


async def test_a_redeployed_set_replaces_the_old_one(tmp_path: Path) -> None:
    router = DecodeRouter(RouterSettings(model_id="m"))
    router._state.restore_from_ingress(Restore("c", ("r0",)))
    assert await router.expert_placement_of_position("r0", "") is None
    save_placements(tmp_path, range(3))
    await router.configure(settings(tmp_path))
    router._state.restore_from_ingress(Restore("c", ("r0",)))
    assert await router.expert_placement_of_position("r0", "") is not None
