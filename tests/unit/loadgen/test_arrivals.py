"""Arrival processes and traces."""

import gzip
import itertools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from eldr_serve.errors import UserInputError
from loadgen.arrivals import Arrival, closed_loop, open_loop, output_lengths, poisson, share
from loadgen.load import Load
from loadgen.traces import BLOCK_TOKENS, RecordedArrival, read_arrival_trace, replay
from loadgen.workload import WorkloadPrompt
from tests.support.shipped import ROOT


def common_prefix(one: str, other: str) -> int:
    return next(n for n in itertools.count() if one[: n + 1] != other[: n + 1])


PROMPTS = [WorkloadPrompt(f"p{n}", f"d{n % 3}", f"words of prompt {n} " * 4) for n in range(30)]


def first_of(stream: Iterator[Any], number: int) -> list[Any]:
    return list(itertools.islice(stream, number))


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential_at_the_rate(rate: float) -> None:
    times = np.array(first_of(poisson(rate, seed=3), 20_000))
    gaps = np.diff(times, prepend=0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01
    assert len(times) / times[-1] == pytest.approx(rate, rel=0.03)
    # Counts of disjoint intervals: their variance is their mean, and they are independent.
    counts = np.bincount((times * rate / 10).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_a_stream_depends_on_its_seed_alone() -> None:
    first, again, other = (
        first_of(open_loop(PROMPTS, 5, max_tokens=8, seed=seed), 100) for seed in (1, 1, 2)
    )
    assert first == again
    assert [a.due_s for a in first] != [a.due_s for a in other]
    assert [a.prompt for a in first] != [a.prompt for a in other]
    assert [a.number for a in first] == list(range(100))
    for rate in (0, -1, float("nan"), float("inf")):  # the call fails before any request
        with pytest.raises(UserInputError):
            open_loop(PROMPTS, rate, max_tokens=8)


def test_output_lengths_are_uniform_and_equal_in_both_loops() -> None:
    lengths = first_of(output_lengths(12, min_tokens=5, seed=3), 8_000)
    assert set(lengths) == set(range(5, 13))
    assert stats.chisquare(np.bincount(lengths)[5:]).pvalue > 0.01
    opened = open_loop(PROMPTS, 5, max_tokens=12, min_tokens=5, seed=3)
    closed = closed_loop(PROMPTS, max_tokens=12, min_tokens=5, seed=3)
    for stream in (opened, closed):
        assert [a.max_tokens for a in first_of(stream, 100)] == lengths[:100]
    assert set(first_of(output_lengths(12), 100)) == {12}
    for least in (0, 13):
        with pytest.raises(UserInputError):
            output_lengths(12, min_tokens=least)


def test_shares_partition_the_stream_without_common_prompts() -> None:
    processes = 4  # 30 prompts do not divide by it

    def stream(prompts: list[WorkloadPrompt] = PROMPTS) -> Iterator[Arrival]:
        return open_loop(prompts, 5, max_tokens=8, processes=processes)

    shares = [first_of(share(stream(), i, processes), 100) for i in range(processes)]
    assert sorted((a for part in shares for a in part), key=lambda a: a.number) == first_of(stream(), 400)
    for one, other in itertools.combinations(shares, 2):
        assert not {a.prompt.id for a in one} & {a.prompt.id for a in other}
    with pytest.raises(UserInputError):
        stream(PROMPTS[:3])


AZURE = "timestamp_s,prompt_tokens,output_tokens\n0.0000,374,44\n4.3146,396,109\n4.3146,20,7\n"
MOONCAKE = (
    '{"timestamp_ms":0,"prompt_tokens":1200,"output_tokens":50,"hash_ids":[0,1,2]}\n'
    '{"timestamp_ms":1500,"prompt_tokens":2000,"output_tokens":9,"hash_ids":[0,1,2,3]}\n'
    '{"timestamp_ms":2500,"prompt_tokens":600,"output_tokens":5,"hash_ids":[0,9]}\n'
)


@pytest.fixture
def trace(tmp_path: Path) -> list[RecordedArrival]:
    (tmp_path / "m.jsonl").write_text(MOONCAKE)
    return read_arrival_trace(tmp_path / "m.jsonl")


def test_both_formats_can_be_read(trace: list[RecordedArrival], tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    assert read_arrival_trace(tmp_path / "a.csv.gz")[1] == RecordedArrival(4.3146, 396, 109)
    assert trace[1] == RecordedArrival(1.5, 2000, 9, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", AZURE + "3.0,10,10\n", "line 5"),  # times decrease
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
    with pytest.raises(UserInputError, match=rf"\A.*{line}.*\Z"):
        read_arrival_trace(tmp_path / name)


def test_only_equal_leading_blocks_become_equal_text(trace: list[RecordedArrival]) -> None:
    first, longer, other = list(replay(trace, PROMPTS, chars_per_token=2))
    block = BLOCK_TOKENS * 2
    assert [len(a.prompt.text) for a in (first, longer, other)] == [2400, 4000, 1200]
    assert longer.prompt.text.startswith(first.prompt.text)
    assert block <= common_prefix(first.prompt.text, other.prompt.text) < block + 10
    assert first.prompt.domain == longer.prompt.domain  # one conversation
    assert list(replay(trace, PROMPTS, chars_per_token=2)) == [first, longer, other]
    # These requests have no blocks.
    one, two = replay([RecordedArrival(0, 100, 5), RecordedArrival(1, 100, 5)], PROMPTS[:1])
    assert len(one.prompt.text) == len(two.prompt.text) == 400
    assert common_prefix(one.prompt.text, two.prompt.text) < 5


def test_speed_and_limits_are_applied(trace: list[RecordedArrival]) -> None:
    options = {"speed": 2, "max_prompt_tokens": 200, "max_tokens": 8, "chars_per_token": 4}
    arrivals = list(replay(trace, PROMPTS, **options))
    assert [a.due_s for a in arrivals] == [0.0, 0.75, 1.25]
    assert [len(a.prompt.text) for a in arrivals] == [480, 800, 240]  # all by one factor
    assert [a.max_tokens for a in arrivals] == [8, 8, 5]
    for bad in ({"speed": 0}, {"speed": -1}, {"max_prompt_tokens": 0}, {"chars_per_token": 0}):
        with pytest.raises(UserInputError):
            replay(trace, PROMPTS, **bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"rate": -1.0},
        {"prompts": "nowhere"},
        {"trace": "nowhere.csv"},
        {"trace": str(ROOT / "Makefile")},
        {"max_tokens": 0},
        {"min_tokens": 7},
    ],
)
def test_a_load_with_bad_options_is_refused_before_it_begins(bad: dict[str, Any]) -> None:
    """The command prints the sentence and exits with 2: see test_locust.py."""
    options: dict[str, Any] = {
        "prompts": ROOT / "examples/demo_model/prompts",
        "rate": 0.0,
        "trace": "",
        "seed": 0,
    }
    options |= {"trace_speed": 1.0, "max_prompt_tokens": 0, "chars_per_token": 4.0, "record": ""}
    options |= {"max_tokens": 6, "min_tokens": 0, "slo_ttft_ms": 1000.0, "slo_tpot_ms": 100.0}
    assert Load(Namespace(**options)).good == 0
    with pytest.raises(UserInputError, match=r"\A.+\Z"):
        Load(Namespace(**options | bad))
