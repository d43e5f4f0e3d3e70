"""Arrival processes and traces."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from loadgen.arrivals import closed_loop, open_loop, output_lengths, poisson, share
from loadgen.traces import BLOCK_TOKENS, TraceRequest, read_trace, replay
from loadgen.workload import Prompt
from tools.cli import BadInput


def common_prefix(one: str, other: str) -> int:
    """Length of it."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


PROMPTS = [Prompt(f"p{n}", f"d{n % 3}", f"words of prompt {n} " * 4) for n in range(30)]


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential_at_the_rate(rate: float) -> None:
    times = np.array(list(itertools.islice(poisson(rate, seed=3), 20_000)))
    gaps = np.diff(times, prepend=0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.03)
    # Counts of disjoint seconds: variance as the mean, and no memory.
    counts = np.bincount((times * rate / 10).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_a_stream_repeats_by_seed_and_by_nothing_else() -> None:
    first, again, other = (
        list(itertools.islice(open_loop(PROMPTS, 5, max_tokens=8, seed=seed), 100)) for seed in (1, 1, 2)
    )
    assert first == again
    assert [a.due_s for a in first] != [a.due_s for a in other]
    assert [a.prompt for a in first] != [a.prompt for a in other]
    assert [a.number for a in first] == list(range(100))


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_before_anything_is_sent(rate: float) -> None:
    with pytest.raises(BadInput):
        open_loop(PROMPTS, rate, max_tokens=8)


def test_output_lengths_are_even_between_their_bounds_and_alike_in_both_loops() -> None:
    drawn = np.array(list(itertools.islice(output_lengths(12, least=5, seed=3), 8_000)))
    assert set(drawn) == set(range(5, 13))
    assert stats.chisquare(np.bincount(drawn)[5:]).pvalue > 0.01
    both = [
        [a.max_tokens for a in itertools.islice(stream, 100)]
        for stream in (
            open_loop(PROMPTS, 5, max_tokens=12, min_tokens=5, seed=3),
            closed_loop(PROMPTS, max_tokens=12, min_tokens=5, seed=3),
        )
    ]
    assert both[0] == both[1] == drawn[:100].tolist()
    assert set(itertools.islice(output_lengths(12), 100)) == {12}
    for least in (0, 13):
        with pytest.raises(BadInput):
            output_lengths(12, least=least)


def test_shares_are_together_the_stream_and_share_no_prompt() -> None:
    workers = 4  # 30 prompts are no multiple of it
    whole = list(itertools.islice(open_loop(PROMPTS, 5, max_tokens=8, workers=workers), 400))
    shares = [
        list(itertools.islice(share(open_loop(PROMPTS, 5, max_tokens=8, workers=workers), i, workers), 100))
        for i in range(workers)
    ]
    assert sorted((a for part in shares for a in part), key=lambda a: a.number) == whole
    for one, other in itertools.combinations(shares, 2):
        assert not {a.prompt.id for a in one} & {a.prompt.id for a in other}
    with pytest.raises(BadInput):
        open_loop(PROMPTS[:3], 5, max_tokens=8, workers=workers)


# -- traces ------------------------------------------------------------------------------------------

AZURE = "timestamp_s,prompt_tokens,output_tokens\n0.0000,374,44\n4.3146,396,109\n4.3146,20,7\n"
MOONCAKE = (
    '{"timestamp_ms":0,"prompt_tokens":1200,"output_tokens":50,"hash_ids":[0,1,2]}\n'
    '{"timestamp_ms":1500,"prompt_tokens":2000,"output_tokens":9,"hash_ids":[0,1,2,3]}\n'
    '{"timestamp_ms":2500,"prompt_tokens":600,"output_tokens":5,"hash_ids":[0,9]}\n'
)


def test_both_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    assert read_trace(tmp_path / "a.csv.gz")[1] == TraceRequest(4.3146, 396, 109)
    assert read_trace(tmp_path / "m.jsonl")[1] == TraceRequest(1.5, 2000, 9, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", AZURE + "3.0,10,10\n", "line 5"),  # back in time
        ("a.csv", AZURE + "5.0,-1,10\n", "line 5"),
        ("a.csv", AZURE + "5.0,10,0\n", "line 5"),
        ("a.csv", AZURE + "5.0,10\n", "line 5"),
        ("a.csv", AZURE + "5.0,,10\n", "line 5"),
        ("a.csv", AZURE + "nan,10,10\n", "line 5"),
        ("a.csv", "time,in,out\n0,1,1\n", "line 1"),
        ("a.csv", "timestamp_s,prompt_tokens,output_tokens\n", "no request"),
        ("m.jsonl", MOONCAKE + '{"timestamp_ms":1}\n', "line 4"),
        ("m.jsonl", MOONCAKE + "{\n", "line 4"),
        ("m.jsonl", MOONCAKE + "[]\n", "line 4"),
        ("m.jsonl", '{"timestamp_ms":0,"prompt_tokens":513,"output_tokens":5,"hash_ids":[1]}\n', "line 1"),
        ("m.txt", MOONCAKE, "name"),
        ("m.jsonl.gz", MOONCAKE, "cannot be read"),
    ],
)
def test_a_bad_trace_is_refused_in_one_sentence_with_its_line(
    tmp_path: Path, name: str, content: str, line: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=line) as refused:
        read_trace(tmp_path / name)
    assert "\n" not in str(refused.value)


def trace(tmp_path: Path) -> list[TraceRequest]:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    return read_trace(tmp_path / "m.jsonl")


def test_equal_leading_blocks_are_equal_text_and_others_are_not(tmp_path: Path) -> None:
    first, longer, other = list(replay(trace(tmp_path), PROMPTS, chars_per_token=2))
    block = BLOCK_TOKENS * 2
    assert [len(a.prompt.text) for a in (first, longer, other)] == [2400, 4000, 1200]
    assert longer.prompt.text.startswith(first.prompt.text)
    shared = common_prefix(first.prompt.text, other.prompt.text)
    assert block <= shared < block + 10
    assert first.prompt.domain == longer.prompt.domain  # one conversation
    assert list(replay(trace(tmp_path), PROMPTS, chars_per_token=2)) == [first, longer, other]


def test_speed_and_caps(tmp_path: Path) -> None:
    arrivals = list(
        replay(trace(tmp_path), PROMPTS, speed=2, max_prompt_tokens=200, max_tokens=8, chars_per_token=4)
    )
    assert [a.due_s for a in arrivals] == [0.0, 0.75, 1.25]
    assert [len(a.prompt.text) for a in arrivals] == [480, 800, 240]  # all by one factor
    assert [a.max_tokens for a in arrivals] == [8, 8, 5]
    assert arrivals[1].prompt.text.startswith(arrivals[0].prompt.text)
    for bad in ({"speed": 0}, {"speed": -1}, {"max_prompt_tokens": 0}, {"chars_per_token": 0}):
        with pytest.raises(BadInput):
            replay(trace(tmp_path), PROMPTS, **bad)  # type: ignore[arg-type]


def test_requests_without_blocks_share_no_prefix() -> None:
    azure = [TraceRequest(0, 100, 5), TraceRequest(1, 100, 5)]
    one, two = list(replay(azure, PROMPTS[:1]))
    assert len(one.prompt.text) == len(two.prompt.text) == 400
    assert common_prefix(one.prompt.text, two.prompt.text) < 5
