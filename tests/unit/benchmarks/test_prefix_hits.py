"""Prompts and figures of the comparison of predicted with measured prefix hits."""

from __future__ import annotations

import math
import random

from benchmarks.lib.whole.workloads import SHRINK, conversations
from benchmarks.serving.prefix_hits import first_prompt, make_row, next_prompt
from loadgen.traces import BLOCK_TOKENS, RecordedArrival
from tests.support.in_process import command, sentence


def turn(tokens: int, *blocks: int, output: int = 64) -> RecordedArrival:
    return RecordedArrival(0.0, tokens, output, blocks)


def test_first_prompts_share_the_blocks_that_they_share_in_the_trace() -> None:
    one, other = first_prompt(turn(1100, 0, 7, 8), 1), first_prompt(turn(1000, 0, 9), 1)
    size = BLOCK_TOKENS // SHRINK
    assert (len(one), len(other)) == (1100 // SHRINK, 1000 // SHRINK)
    assert one[:size] == other[:size]
    assert one[size : 2 * size] != other[size:][:size]


def test_a_next_prompt_has_the_history_and_the_new_tokens_of_the_trace() -> None:
    history, before = [1, 2, 3], turn(320, 0)
    prompt = next_prompt(history, before, turn(320 + 64 + 10 * SHRINK, 0), random.Random(0))
    assert (prompt[:3], len(prompt)) == (history, 13)
    assert len(next_prompt(history, before, turn(320, 0), random.Random(0))) == 4


def test_conversations_have_a_second_block_of_their_own() -> None:
    turns = [turn(900, 0, 5), turn(1500, 0, 5, 6), turn(2000, 0, 5, 6, 7)]
    assert conversations([*turns, turn(900, 0, 8)]) == [turns]


def test_a_row_compares_the_counts_of_its_own_requests() -> None:
    before = {"prefill_tokens": 100, "prefix_tokens_predicted": 50}
    after = {"prefill_tokens": 1100, "prefix_tokens_predicted": 470, "prefix_tokens_measured": 400}
    figures = make_row(before, after)
    assert (figures["prompt_tokens"], figures["predicted_pct"], figures["measured_pct"]) == (1000, 42.0, 40.0)
    assert round(figures["error_pct"], 6) == 5.0
    assert math.isnan(make_row({}, {"prefill_tokens": 1})["error_pct"])


def test_an_unknown_map_is_refused_before_anything_starts() -> None:
    message = sentence(command("benchmarks.serving.prefix_hits", trace="none.jsonl", maps="nobody"))
    assert "there is no map 'nobody'; there are events, estimate" in message
