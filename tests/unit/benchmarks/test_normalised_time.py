"""Normalised time from synthetic samples of CPU speed, and the probe that takes samples."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.cpu_speed import record_cpu_speed
from benchmarks.lib.normalised_time import NormalisedTime, fit_engine_sensitivity, normalise_trial
from eldr_serve.errors import UserInputError
from loadgen.trial import Trial
from tests.support.processes import python

HALF_AT = 50.0  # from here on the cores of `samples` do half as much


def samples(*, slow: float = 2.0, stolen: float = 0.0, seconds: float = 100.0) -> np.ndarray:
    """Return samples of one core, which from HALF_AT on takes `slow` times as long or loses stolen time."""
    times = np.arange(0.0, seconds + 0.1, 0.25)
    late = np.maximum(0.0, times - HALF_AT)
    probe_s = np.where(times < HALF_AT, 1e-3, slow * 1e-3)
    return np.column_stack([times, probe_s, 100 * stolen * late, 100 * times])


@pytest.mark.parametrize("cores", [[samples()], [samples(), samples()], [samples(slow=1.0, stolen=0.5)]])
def test_a_second_at_half_speed_is_half_a_normalised_second(cores: list[np.ndarray]) -> None:
    clock = NormalisedTime(cores)
    fast, slow = clock.seconds(10.0, 40.0), clock.seconds(60.0, 90.0)
    assert slow == pytest.approx(fast / 2, rel=0.01)
    assert clock.seconds(0.0, 100.0) == pytest.approx(100.0)  # wall time at the mean speed
    assert clock.seconds(10.0, 90.0) == pytest.approx(clock.seconds(10.0, 37.0) + clock.seconds(37.0, 90.0))


def test_the_slowdown_excludes_stolen_time(tmp_path: Path) -> None:
    slow, stolen = NormalisedTime([samples()]), NormalisedTime([samples(slow=1.0, stolen=0.5)])
    assert slow.slowdown(60.0, 90.0) == pytest.approx(2 * slow.slowdown(10.0, 40.0))
    assert stolen.slowdown(60.0, 90.0) == pytest.approx(stolen.slowdown(10.0, 40.0)) == pytest.approx(1.0)
    with pytest.raises(UserInputError, match="no speed record covers"):
        slow.seconds(90.0, 120.0)
    with pytest.raises(UserInputError, match="no records"):
        NormalisedTime.read(tmp_path)


def test_a_few_interrupted_samples_change_little_and_a_gap_is_bridged() -> None:
    even = samples(slow=1.0)
    interrupted = np.random.default_rng(0).choice(len(even), 40, replace=False)
    even[interrupted, 1] *= np.repeat([0.0, 5.0], 20)
    assert NormalisedTime([even]).seconds(10.0, 60.0) == pytest.approx(50.0, rel=1e-6)
    even[(even[:, 0] > 30.0) & (even[:, 0] < 36.0), 1] = 0.0
    assert NormalisedTime([even]).seconds(10.0, 60.0) == pytest.approx(50.0, rel=1e-6)
    gap = samples()
    gap = gap[(gap[:, 0] < 60.0) | (gap[:, 0] > 80.0)]
    assert NormalisedTime([gap]).seconds(60.0, 80.0) == pytest.approx(
        NormalisedTime([samples()]).seconds(60.0, 80.0), rel=0.02
    )


def record(sent_s: float, **times: Any) -> dict[str, Any]:
    """Return a request of a load that began at Unix time 0."""
    return {"number": 0, "due_s": None, "sent_s": sent_s, "sent_unix_s": sent_s} | times


def test_a_request_takes_as_long_on_slow_cores_as_on_fast_ones() -> None:
    quick = {"ttft_s": 2.0, "tpot_s": 0.1, "end_s": 12.0, "itl_s": [0.1] * 100, "handover_s": 0.5}
    slow = {k: [2 * gap for gap in v] if isinstance(v, list) else 2 * v for k, v in quick.items()}
    failed = record(70.0, error="HTTP 500")
    engines = {"seconds": 6.0, "token_seconds": 60.0, "requests": 10.0}
    trial = Trial("random", 0, [record(20.0, **quick), record(60.0, **slow), failed], engines)
    even = normalise_trial(trial, NormalisedTime([samples()]))
    first, second, unknown = even.requests
    for key in quick:
        assert second[key] == pytest.approx(first[key], rel=0.01), key
    assert first["tpot_s"] == pytest.approx(0.1 / 0.75, rel=0.02)  # the mean speed is 3/4 of the first half's
    for before, after in zip(trial.requests[:2], even.requests[:2], strict=True):
        assert after["sent_s"] + after["end_s"] == pytest.approx(before["sent_s"] + before["end_s"])
    assert unknown == failed
    assert even.engines["requests"] == 10.0
    assert 3.0 < even.engines["seconds"] < 6.0 == engines["seconds"]
    assert even.engines["token_seconds"] == pytest.approx(10 * even.engines["seconds"])


@pytest.mark.parametrize("sensitivity", [0.0, 0.5, 1.0, 1.5])
def test_the_sensitivity_of_steps_is_fitted_to_trials_of_a_policy(sensitivity: float) -> None:
    """Use two equal balancers and a policy whose steps take half as long, on cores of changing speed."""
    slowdown = np.array([1.0, 1.5, 0.8, 1.2, 2.0, 1.0, 0.7, 1.6])
    times = np.arange(0.0, 800.0, 0.25)
    core_records = np.column_stack(
        [times, 1e-3 * slowdown[(times // 100).astype(int)], 0 * times, 100 * times]
    )
    policies = ["random", "round-robin", "marginal-cost"] * 2 + ["random"] * 2
    trials = []
    for n, policy in enumerate(policies):
        sent = record(100.0 * n + 10.0, ttft_s=10.0, tpot_s=0.1, end_s=80.0, itl_s=[], handover_s=None)
        seconds = (5.0 if policy == "marginal-cost" else 10.0) * slowdown[n] ** sensitivity
        trials.append(
            Trial(policy, 0, [sent], {"seconds": seconds, "token_seconds": seconds, "requests": 100.0})
        )
    alike = ("random", "round-robin")
    clock = NormalisedTime([core_records])
    assert fit_engine_sensitivity(trials, clock, alike) == pytest.approx(sensitivity, abs=0.02)
    assert fit_engine_sensitivity(trials[:5], clock, alike) == 1.0  # too few trials
    even = [normalise_trial(trial, NormalisedTime([core_records], sensitivity)).engines for trial in trials]
    for group in (alike, ("marginal-cost",)):
        took = [e["seconds"] for e, name in zip(even, policies, strict=True) if e and name in group]
        assert np.ptp(took) < 0.2


@pytest.mark.benchmarks
def test_the_speed_of_every_core_is_sampled_until_the_end(tmp_path: Path) -> None:
    began = time.time()
    with record_cpu_speed(tmp_path):
        deadline = time.monotonic() + 120
        files = [tmp_path / f"cpu_speed_{core}.jsonl" for core in os.sched_getaffinity(0)]
        while not all(f.exists() and len(f.read_text().splitlines()) > 8 for f in files):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    lines = [f.read_text() for f in files]
    noted = [[json.loads(line)[0] for line in text.splitlines()] for text in lines]
    start, end = max(times[0] for times in noted), min(times[-1] for times in noted)
    clock = NormalisedTime.read(tmp_path)
    assert clock.seconds(start, end) > 0.0
    with pytest.raises(UserInputError):
        clock.seconds(began - 10.0, end)
    time.sleep(1.0)
    assert [f.read_text() for f in files] == lines


@pytest.mark.benchmarks
def test_nothing_is_sampled_if_the_parent_ended_during_the_imports(tmp_path: Path) -> None:
    core, other = min(os.sched_getaffinity(0)), os.getppid()  # this is not the parent of the new process
    done = python("-m", "benchmarks.lib.cpu_speed", core, tmp_path / "speed.jsonl", other)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "speed.jsonl").read_text() == ""
