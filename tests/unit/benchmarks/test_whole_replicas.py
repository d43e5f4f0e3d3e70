"""The live comparison of whole replicas: its workloads, its trials and its rows."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.client import Answer
from benchmarks.lib.engines import plain_engine_kwargs
from benchmarks.lib.normalised_time import NormalisedTime
from benchmarks.lib.whole import report as whole_report
from benchmarks.lib.whole.workloads import (
    APPLICATIONS,
    SHRINK,
    SYSTEM_CHARS,
    many_domains,
    sessions,
    system_prompts,
)
from benchmarks.serving import whole_replicas
from eldr_serve.errors import UserInputError
from loadgen.journal import Journal
from loadgen.sse import StreamTiming
from loadgen.traces import BLOCK_TOKENS, RecordedArrival
from loadgen.workload import WorkloadPrompt
from tests.support.in_process import command, sentence

PROMPTS = [WorkloadPrompt(f"p{n}", f"d{n % 3}", f"{n} of domain {n % 3}, " + "text " * n) for n in range(30)]
ANSWERS = range(8, 17)


def test_prompts_repeat_only_after_all_were_sent() -> None:
    chains = many_domains(PROMPTS, ANSWERS, random.Random(0), tag="t", count=40)
    texts = [body["prompt"] for (body,) in chains]
    assert len(set(texts[:30])) == 30
    assert texts[30:] == texts[:10]
    assert {body["max_tokens"] for (body,) in chains} <= set(ANSWERS)


def test_turns_of_a_session_follow_the_trace_in_order() -> None:
    """Play two sessions with interleaved turns. Sessions that are too short or too long are left out."""
    turns: dict[str, list[tuple[int, ...]]] = {}
    turns |= {"a": [(0, 1), (0, 1, 2), (0, 1, 2, 3)], "b": [(0, 9), (0, 9, 8), (0, 9, 7)], "c": [(0, 5)]}
    records = [
        RecordedArrival(float(turn), len(ids) * BLOCK_TOKENS, 80, ids)
        for turn in range(3)
        for ids in (session[turn] for session in turns.values() if turn < len(session))
    ]
    chains = sessions(records, PROMPTS, ANSWERS, random.Random(0), tag="t", count=9)
    assert sorted(len(chain) for chain in chains) == [3, 3]
    for chain in chains:
        assert len({body["user"] for body in chain}) == 1
        assert {body["max_tokens"] for body in chain} == {10}
        first, *later = (body["prompt"] for body in chain)
        assert all(text.startswith(first) for text in later)
        lengths = [len(text) for text in (first, *later)]
        assert lengths[1] - lengths[0] == pytest.approx(BLOCK_TOKENS / SHRINK * 2.5, abs=1)
    assert chains[0][0]["user"] != chains[1][0]["user"]


def test_prompts_of_an_application_begin_with_its_text_and_follow_its_popularity() -> None:
    chains = system_prompts(PROMPTS, ANSWERS, random.Random(0), tag="t", count=400)
    begin: dict[str, str] = {}
    for (body,) in chains:
        text = body["prompt"][: SYSTEM_CHARS + len(body["user"]) - len("t application")]
        assert begin.setdefault(body["user"], text) == text
    assert len(begin) <= APPLICATIONS
    users = Counter(body["user"] for (body,) in chains).most_common()
    assert users[0][1] > 5 * users[-1][1]


def _trial(chains: int, **sizes: int) -> tuple[dict[str, Any], list[int]]:
    """Return a trial of a service that answers one request at a time, and the requests that it got."""
    sent: list[int] = []

    async def send(http: Any, body: dict[str, Any]) -> Answer:
        sent.append(body["number"])
        number = float(len(sent))
        await asyncio.sleep(0)
        return Answer(number, number + 1, StreamTiming([0.5, 0.5 + number]))

    work = [[{"number": 2 * n}, {"number": 2 * n + 1}] for n in range(chains)]
    return asyncio.run(whole_replicas._trial(send, work, **sizes)), sent


def test_a_trial_counts_the_same_requests_of_each_system() -> None:
    """Count requests that are sent after the warm-up, whenever they end."""
    trial, sent = _trial(50, in_flight=2, warm_up=4, requests=6)
    assert (trial["requests"], trial["failures"]) == (6, 0)
    assert trial["tpot_p50_ms"] == pytest.approx(1000 * 7.5)  # only the fifth to the tenth request count
    assert len(sent) < 50  # then the loop was stopped
    for chain in range(len(sent) // 2):  # a chain's second after its first
        assert sent.index(2 * chain) < sent.index(2 * chain + 1)
    with pytest.raises(UserInputError, match="4 requests, but a trial needs 11"):
        _trial(2, in_flight=2, warm_up=4, requests=6)


def test_a_trial_waits_for_its_slowest_measured_request() -> None:
    """The third request outlasts all others. Only its time counts."""
    ended: list[int] = []

    async def send(http: Any, body: dict[str, Any]) -> Answer:
        slow, start = body["number"] == 2, time.perf_counter()
        for _ in range(40 if slow else 1):
            await asyncio.sleep(0)
        ended.append(body["number"])
        return Answer(start, time.perf_counter(), StreamTiming([0.1, 9.1 if slow else 0.2]))

    work = [[{"number": n}] for n in range(200)]
    trial = asyncio.run(whole_replicas._trial(send, work, in_flight=4, warm_up=2, requests=1))
    assert trial["tpot_p50_ms"] == pytest.approx(9000)
    assert trial["span"][0] < trial["span"][1] <= time.time()
    assert ended.index(2) > 20
    assert len(ended) < 200


def test_our_system_is_compared_with_each_other_system_round_by_round() -> None:
    """A slow round affects all systems equally, so it changes no comparison."""
    zeros = dict.fromkeys((*whole_report.METRICS, "requests", "failures"), 1.0)
    trials = {
        f"{number}/sessions/{system}": zeros | {"tpot_p50_ms": tpot * slow, "cpu_ms": {"engines": slow}}
        for number, slow in enumerate((1.0, 2.0, 4.0))
        for system, tpot in ((whole_report.OURS, 9.0), ("vllm-router/cache_aware", 10.0))
    }
    rows = whole_report.rows(trials, [whole_report.OURS, "vllm-router/cache_aware"], ["sessions"])
    ours, other = rows
    assert (ours["system"], ours["rounds"], ours["tpot_p50_ms"]) == (whole_report.OURS, 3, 18)
    assert not any(key.startswith("ours_") for key in ours)
    assert [other[f"ours_tpot_p50_pct{end}"] for end in ("", "_low", "_high")] == pytest.approx([-10] * 3)
    assert other["engines_cpu_ms"] == 2
    names = [f"server_{name}" for name in ("ttft_sum", "ttft_count", "queue_sum", "queue_count")]
    before, after = (dict(zip(names, v, strict=True)) for v in ((1.0, 2, 0.0, 2), (3.0, 6, 1.0, 6)))
    for trial in trials.values():
        trial |= whole_report.means(before, after)
    (row,) = whole_report.rows(trials, [whole_report.OURS], ["sessions"])
    assert (row["server_ttft_mean_ms"], row["server_queue_mean_ms"]) == (500, 250)
    before, after = (
        {"steps": 2.0, "active_experts": 10.0, "requests": 4.0},
        {"steps": 6.0, "active_experts": 90.0, "requests": 36.0},
    )
    assert whole_report.means(before, after) == {"active_experts": 20, "batch_size": 8}
    # A system that a stopped run has not measured has no row.
    assert whole_report.rows(trials, ["eldr/random"], ["sessions"]) == []


def test_a_system_is_not_charged_for_slow_cores() -> None:
    """Use two equal systems, and ours, whose steps take 3/4 as long, on cores of changing speed."""
    slowdown = [1.0, 1.5, 0.8, 1.2, 2.0, 1.0, 0.7, 1.6, 0.9]
    sampled_s = np.arange(0.0, 900.0, 0.25)
    core_records = np.column_stack(
        [sampled_s, [1e-3 * slowdown[int(t // 100)] for t in sampled_s], 0 * sampled_s, 100 * sampled_s]
    )
    trials = {}
    for n, slow in enumerate(slowdown):
        system = ("vllm-router/round_robin", "vllm-router/power_of_two", whole_report.OURS)[n % 3]
        ms = slow * (7.5 if system == whole_report.OURS else 10.0)
        times = dict.fromkeys(whole_report.METRICS, ms) | {"requests_per_s": 1 / ms}
        cpu = {"engines": 2 * ms, "proxy": ms}
        span = [100.0 * n + 10.0, 100.0 * n + 90.0]
        trials[f"{n // 3}/sessions/{system}"] = times | {"span": span, "cpu_ms": cpu}
    even = whole_report.normalise_speed(trials, NormalisedTime([core_records]))
    ratio = {k: figures["tpot_p50_ms"] / 10.0 for k, figures in even.items()}
    same = next(iter(ratio.values()))
    for key, figures in even.items():
        share = 0.75 if key.endswith(whole_report.OURS) else 1.0
        assert ratio[key] == pytest.approx(share * same, rel=0.05)
        assert 1 / figures["requests_per_s"] == pytest.approx(figures["tpot_p50_ms"])
        assert figures["cpu_ms"]["engines"] == pytest.approx(2 * figures["engine_ms_per_token"], rel=1e-6)
        assert trials[key]["tpot_p50_ms"] == pytest.approx(figures["slow"] * figures["tpot_p50_ms"])


def test_plain_whole_servers_differ_only_in_the_missing_transfer() -> None:
    kwargs = plain_engine_kwargs("whole", {"max_num_seqs": 64})
    assert "kv_transfer_config" not in kwargs
    assert "scheduler_cls" not in kwargs
    assert kwargs["enable_prefix_caching"]
    assert kwargs["max_num_seqs"] == 64


def test_a_journal_of_trials_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = whole_replicas.ComparisonSettings(record=tmp_path / "trials.jsonl")
    Journal(tmp_path / "trials.jsonl", settings.inputs()).put("0/sessions/eldr/random", {})
    Journal(tmp_path / "trials.jsonl", replace(settings, rounds=9, out=tmp_path).inputs())
    for name, value in {"seed": 1, "calibration": Path("other.safetensors"), "in_flight": 7}.items():
        with pytest.raises(UserInputError, match=rf"different settings \({name}\)"):
            Journal(tmp_path / "trials.jsonl", replace(settings, **{name: value}).inputs())
    assert {field.name for field in fields(settings)} >= whole_replicas._OTHER_SETTINGS


def test_impossible_options_are_refused_before_anything_starts() -> None:
    for options, words in (
        ({"systems": "nobody"}, "there is no system 'nobody'"),
        ({"systems": "vllm-router/cache_aware"}, "'vllm-router/cache_aware' needs an option"),
        ({"workloads": "sessions"}, "'sessions' needs an option"),
    ):
        assert words in sentence(command("benchmarks.serving.whole_replicas", **options))
    assert whole_replicas._choose("workload", "", whole_replicas.WORKLOADS, "sessions", None) == [
        "many domains",
        "system prompts",
    ]
