"""The comparison of model families finds counts that are wrong by one, and excuses only near ties."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.engine import model_families
from benchmarks.engine.model_families import family_row, gap
from benchmarks.lib.family_engine import ObservedChoices
from eldr_serve.engine.routes import pack_routes
from eldr_serve.experts.signature import pack_counts

LAYERS, EXPERTS, K = 2, 8, 2
PROMPT, OUTPUT, CHUNK, BLOCK = 20, 4, 6, 4
RNG = np.random.default_rng(0)
CHOSEN = np.sort(RNG.random((PROMPT + OUTPUT - 1, LAYERS, EXPERTS)).argsort(-1)[..., :K], axis=-1)
OTHER = (CHOSEN + 1) % EXPERTS  # no choice of any token

Counts = NDArray[np.int64]
Line = Callable[..., dict[str, Any]]


def histogram(chosen: NDArray[np.int64]) -> Counts:
    return np.stack([np.bincount(chosen[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])


def record(
    prompt: Counts | None = None, decode: Counts | None = None, routes: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """Return a request as family_engine reports it, with these counts instead of the right ones."""
    prompt = histogram(CHOSEN[:PROMPT]) if prompt is None else prompt
    decode = histogram(CHOSEN[PROMPT:]) if decode is None else decode
    return {
        "prompt": list(range(PROMPT)),
        "output": list(range(OUTPUT)),
        "cached": 0,
        "seen": [[token] for token in CHOSEN.tolist()],
        "eldr_prefill": pack_counts(prompt),
        "eldr_decode": pack_counts(decode),
        "eldr_routes": pack_routes((CHOSEN[PROMPT:] if routes is None else routes).astype(np.int16)),
    }


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    """Return the table row of an engine with one request, where Hugging Face's model agrees with ours."""
    monkeypatch.setattr(
        model_families, "Reference", lambda checkpoint: SimpleNamespace(route=lambda tokens: CHOSEN)
    )

    def row_of(one: dict[str, Any]) -> dict[str, Any]:
        report = {"records": [one], "groups": [], "step_tokens": CHUNK, "preemptions": 0}
        return family_row("Mixtral", "V1", None, report)

    return row_of


def with_one_choice_moved(counts: Counts) -> Counts:
    """Return the counts with one token's choice counted for another expert."""
    wrong = counts.copy()
    layer, expert = np.argwhere(wrong > 0)[0]
    wrong[layer, expert] -= 1
    wrong[layer, (expert + 1) % EXPERTS] += 1
    return wrong


def test_right_counts_are_exact(line: Line) -> None:
    row = line(record())
    assert (row["prompts_exact"], row["decodes_exact"], row["differ_from_hf"]) == (1, 1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        with_one_choice_moved(histogram(CHOSEN[:PROMPT])),
        histogram(CHOSEN[CHUNK:PROMPT]),  # a chunk is skipped
        histogram(CHOSEN[:PROMPT]) + histogram(CHOSEN[:BLOCK]),  # a block of a prefix hit counts twice
        histogram(CHOSEN[: PROMPT - 1]),  # the prompt's last token
        histogram(CHOSEN[: PROMPT + 1]),  # the first generated one
        histogram(np.concatenate([OTHER[:1], CHOSEN[1:PROMPT]])),  # a block keeps its old content
    ],
    ids=["an id", "a chunk", "a block twice", "the last token", "a token more", "another's token"],
)
def test_a_wrong_prompt_count_is_found(line: Line, wrong: Counts) -> None:
    row = line(record(prompt=wrong))
    assert (row["prompts_exact"], row["decodes_exact"]) == (0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode": with_one_choice_moved(histogram(CHOSEN[PROMPT:]))},
        {"routes": np.concatenate([OTHER[:1], CHOSEN[PROMPT + 1 :]])},
        {"routes": CHOSEN[PROMPT:][::-1]},  # right experts at wrong positions
    ],
    ids=["an id", "a route", "the order"],
)
def test_a_wrong_decode_count_is_found(line: Line, wrong: dict[str, Any]) -> None:
    row = line(record(**wrong))
    assert (row["prompts_exact"], row["decodes_exact"]) == (1, 0)


def test_a_token_with_two_observed_choices_excuses_only_those(line: Line) -> None:
    for first, exact in ((CHOSEN, 1), (OTHER, 1), ((CHOSEN + 2) % EXPERTS, 0)):
        near_tie = record(prompt=histogram(np.concatenate([first[:1], CHOSEN[1:PROMPT]])))
        near_tie["seen"][0].append(OTHER[0].tolist())
        row = line(near_tie)
        assert (row["prompts_exact"], row["tokens_near_ties"]) == (exact, 1)
    near_tie = record(prompt=with_one_choice_moved(histogram(CHOSEN[:PROMPT])))
    near_tie["seen"][0].append(OTHER[0].tolist())
    assert line(near_tie)["prompts_exact"] == 0


def test_rows_that_are_not_measured_again_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    published = [{"family": family, "runner": runner, "n": 1} for family in "ab" for runner in ("V1", "V2")]
    monkeypatch.setattr(model_families, "read_rows", lambda name: published)
    again = {"family": "b", "runner": "V1", "n": 2}
    new = {"family": "c", "runner": "V1", "n": 2}
    assert model_families.merge_with_published([again, new]) == [*published[:2], again, published[3], new]


def test_an_engine_failure_loses_no_other_family(tmp_path: Any) -> None:
    (tmp_path / "a.json").write_text('{"records": []}')
    reports = [model_families.read_report(tmp_path / f"{name}.json", -11) for name in "ab"]
    assert reports == [
        {"records": []},
        {"error": "the engines' process ended with status -11 before this one"},
    ]


def test_a_gap_is_the_difference_between_their_score_and_ours() -> None:
    score = np.array([0.0, 10.0, 9.0, 8.9], np.float32)
    assert gap(np.array([1, 3]), np.array([1, 2]), score) == pytest.approx(0.01, rel=1e-4)
    assert gap(np.array([0, 1]), np.array([1, 2]), score) == pytest.approx(0.9, rel=1e-4)
    assert gap(np.array([2, 1]), np.array([1, 2]), score) == 0


def test_a_gap_of_groups_is_between_the_groups() -> None:
    score = np.array([5.0, 4.0, 4.9, 4.0, 0.0, 1.0, 0.0, 0.0], np.float32)  # the groups have 9, 8.9, 1 and 0
    counted_experts, best = np.array([2, 3]), np.array([0, 1])
    assert gap(counted_experts, best, score, (4, 1)) == pytest.approx(0.1 / 9, rel=1e-4)
    assert gap(np.array([4, 5]), best, score, (4, 1)) == pytest.approx(8 / 9, rel=1e-4)
    # With two groups, [0, 1] is not the best choice.
    assert gap(np.array([0, 2]), np.array([0, 1]), score, (4, 2)) < 0


def test_a_step_is_attributed_to_the_tokens_that_it_computed() -> None:
    """Attribute chunks, two requests in one step, and a token that is computed again."""
    choices = object.__new__(ObservedChoices)
    requests = {
        "a": SimpleNamespace(all_token_ids=[1, 2, 3], num_computed_tokens=0),
        "b": SimpleNamespace(all_token_ids=[1, 9], num_computed_tokens=0),
    }
    choices.__dict__ |= {"_choices": defaultdict(list), "_requests": requests, "_step": {}}

    def step(order: list[str], tokens: dict[str, int], rows: list[int]) -> None:
        for name, number in tokens.items():
            requests[name].num_computed_tokens += number
        for layer in range(LAYERS):
            choices._store_choices(layer, np.array([[expert + layer] for expert in rows]))
        choices._attribute(order, tokens)

    step(["a"], {"a": 2}, [10, 20])
    step(["b", "a"], {"a": 1, "b": 2}, [11, 90, 30])
    assert choices.routes([1, 2, 3]) == [[[[10], [11]], [[11], [12]]], [[[20], [21]]], [[[30], [31]]]]
    assert choices.routes([1, 9])[1] == [[[90], [91]]]
