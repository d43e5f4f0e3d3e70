"""The comparison against a fake service: order, pairing, resumption and refusals."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from eldr_serve.commands import client
from eldr_serve.commands.errors import USER_ERRORS
from eldr_serve.errors import UserInputError
from loadgen.compare import compare
from loadgen.figures import policy_rows, tpot_by_domain
from loadgen.journal import Journal
from loadgen.statistics import LatencyObjective
from loadgen.trial import (
    JOURNAL,
    RESTORE,
    LoadSpec,
    ScheduledTrial,
    StatusSample,
    Trial,
    TrialFailedError,
    _run_locust,
    load_start_unix_s,
    parse_policy,
    read_trials,
    run_trial,
    schedule_trials,
    totals_between,
)
from tests.support.fake_service import KEY, FakeService
from tests.support.in_process import command
from tests.support.shipped import ROOT

OWN = {"name": "locality-band", "parameters": {"band": 0.2}}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELDR_ADMIN_KEY", KEY)
    monkeypatch.setattr(client, "_STABLE_S", 0.1)  # the fake's steps are counted at once


def options(service: FakeService, out: Path, **changes: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = dict(
        host=service.url,
        policies="shortest-queue,locality-band:band=0.1",
        rate=15.0,
        trial_seconds=2,
        warm_up_seconds=1,
        rounds=1,
        users=32,
        max_tokens=4,
        min_tokens=2,
        slo_ttft_ms=1e5,
        slo_tpot_ms=1e5,
        out=out,
    )
    return chosen | changes


def test_each_round_has_each_policy_once_in_its_own_order() -> None:
    steps = schedule_trials(["a", "b", "c"], 40, seed=1)
    rounds = [[s.policy for s in steps if s.round == r] for r in range(40)]
    assert all(sorted(policies) == ["a", "b", "c"] for policies in rounds)
    assert min(Counter(policies[0] for policies in rounds).values()) > 4
    assert (
        steps == schedule_trials(["a", "b", "c"], 40, seed=1) != schedule_trials(["a", "b", "c"], 40, seed=2)
    )
    assert all(len({s.seed for s in steps if s.round == r}) == 1 for r in range(40))
    assert len({s.seed for s in steps}) == 40


def test_a_policy_is_set_with_its_parameters() -> None:
    assert parse_policy("random") == ("random", {})
    assert parse_policy("their.rules:Packed:slots=3") == ("their.rules:Packed", {"slots": 3})
    assert parse_policy("x:band=0.1:cap=two:n=3") == ("x", {"band": 0.1, "cap": "two", "n": 3})
    for bad in ("random:band", "x:=1", "x:band="):
        with pytest.raises(UserInputError):
            parse_policy(bad)


@pytest.mark.slow
def test_a_comparison_writes_its_figures_and_resumes_from_its_folder(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.compare.LATE_S", 60.0)  # requests are late on busy cores
    out = tmp_path / "compare"
    service.reports_steps = True
    compare(**options(service, out))
    output = capsys.readouterr().out
    assert "locality-band:band=0.1 reads 0.0 % " in output
    assert output.index("experts per step") < output.index("TPOT p50 ")
    assert "one round has no interval" in output
    assert output.index("TPOT p50 ") < output.index("requests, none failed") < output.index("figure")
    assert service.policy == OWN
    num_requests = len(service.bodies)
    parts = service.bodies[: num_requests // 2], service.bodies[num_requests // 2 :]
    # Both policies get the same requests; no figure includes the warm-up.
    halves = [sorted((b["messages"][0]["content"], b["max_tokens"]) for b in part) for part in parts]
    assert halves[0] == halves[1]
    assert {tokens for _, tokens in halves[0]} == {2, 3, 4}
    # No policy uses cached prefixes of another one.
    salts = [{body["cache_salt"] for body in part} for part in parts]
    assert [len(salt) for salt in salts] == [1, 1]
    assert salts[0] != salts[1]
    result = json.loads((out / "compare.json").read_text())
    assert set(result) == {"name", "commit", "machine", "versions", "seed", "inputs", "rows", "notes"}
    for row in result["rows"]:
        assert 0 < row["requests"] < len(halves[0])
        steps = [row[k] for k in ("active_experts", "batch_size", "engine_ms_per_token", "handover_p50_ms")]
        assert steps == pytest.approx([20, 2, 5, 12.5])
        assert row["ttft_p50_ms_low"] <= row["ttft_p50_ms"] <= row["ttft_p50_ms_high"]
        assert row["goodput_rps"] == pytest.approx(row["requests"] / 2)
    plain, banded = result["rows"]
    assert banded["tpot_p50_ms_baseline"] == "shortest-queue"
    assert "tpot_p50_ms_change_pct" not in plain
    assert banded["engine_ms_per_token_change_pct"] == pytest.approx(0, abs=1e-6)

    # A repetition sends nothing and gives the same figures.
    compare(**options(service, out))
    assert len(service.bodies) == num_requests
    assert json.loads((out / "compare.json").read_text())["rows"] == result["rows"]

    # Other options are another comparison.
    for change in ({"rate": 16.0}, {"rounds": 2}, {"seed": 1}, {"policies": "random,shortest-queue"}):
        with pytest.raises(UserInputError, match=rf"different settings \(.*{next(iter(change))}"):
            compare(**options(service, out, **change))

    # A lost trial is measured again, and the policy before the first run is restored.
    journal = out / JOURNAL
    journal.write_text("\n".join(journal.read_text().splitlines()[:-2]))  # the last line is the restoration
    service.policy = {"name": "random", "parameters": {}}
    compare(**options(service, out))
    assert len(service.bodies) == num_requests + num_requests // 2
    assert service.policy == OWN


@pytest.mark.slow
def test_a_burn_in_precedes_the_first_trial_and_is_not_measured(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compare"
    short = options(service, out, trial_seconds=1, warm_up_seconds=0)
    compare(**short | {"burn_in_seconds": 2})
    assert "burn-in: 2 s" in capsys.readouterr().out
    salts = [body["cache_salt"] for body in service.bodies]
    assert len(set(salts)) == 3
    burnt_in = salts.count(salts[0])
    assert burnt_in > 10
    assert sum(len(trial.requests) for trial in read_trials(out)) == len(salts) - burnt_in
    with pytest.raises(UserInputError, match=r"different settings \(.*burn_in"):
        compare(**short)


@pytest.mark.slow
def test_a_closed_loop_gives_every_policy_the_same_requests_in_the_same_order(
    service: FakeService, tmp_path: Path
) -> None:
    service.gap_s = 0.05
    out = tmp_path / "compare"
    closed = options(service, out, rate=None, in_flight=5, min_tokens=4)
    compare(**closed)
    trials = [trial.requests for trial in read_trials(out)]
    one, other = ({r["number"]: r["id"] for r in trial} for trial in trials)
    assert [one[number] for number in range(15)] == [other[number] for number in range(15)]
    for row, trial in zip(json.loads((out / "compare.json").read_text())["rows"], trials, strict=True):
        # Only requests that end within seconds 1 to 3 are measured.
        ended = [r for r in trial if 1 <= r["sent_s"] + r["end_s"] < 3]
        assert 0 < row["requests"] == len(ended) < len(trial)
        assert row["requests"] <= 55  # 5 in flight, 0.2 s each
        assert row["late_p99_ms"] is None
    with pytest.raises(UserInputError, match=r"different settings \(.*users"):
        compare(**closed | {"in_flight": 6})


@pytest.mark.slow
def test_the_readmes_command_needs_no_load_and_no_model(service: FakeService, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "domain": "d", "prompt": "Hello"}\n')
    words = re.search(r"^eldr compare (.*?)(?:\s+#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    options = words[1].replace("my_prompts/", str(prompts)).replace("marginal-cost", "random").split()
    options[options.index("--out") + 1] = str(tmp_path / "out")
    beside = ["--host", service.url, "--rounds", "1", "--trial-seconds", "1", "--warm-up-seconds", "0"]
    done = command("loadgen.compare", *options, *beside, "--max-tokens", "4")
    assert done.exit_code == 0, done.output
    assert "closed loop of 16 requests in flight" in done.stdout  # 8 on each of 2 decode workers
    assert {body["model"] for body in service.bodies} == {service.model}
    settings = json.loads((tmp_path / "out/compare.json").read_text())["inputs"]
    assert (settings["rate"], settings["users"], settings["model"]) == (0.0, 16, service.model)


@pytest.mark.slow
def test_failed_requests_appear_in_the_first_line_and_the_exit_status(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.fail_every = 4
    with pytest.raises(typer.Exit) as ended:
        compare(**options(service, tmp_path / "c", policies="random"))
    assert ended.value.exit_code == 1
    verdict = next(line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert verdict.split(" requests, ")[0].isdigit()
    assert "FAILED" in (tmp_path / "c" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_restores_the_policy(
    service: FakeService, tmp_path: Path, stop_signal: signal.Signals
) -> None:
    out = tmp_path / "c"
    chosen = options(service, out, trial_seconds=30)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen.compare", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # otherwise it would be inherited
    )
    deadline = time.monotonic() + 40
    while not service.bodies and time.monotonic() < deadline:
        time.sleep(0.1)
    assert service.bodies, "no request came"
    assert service.policy != OWN or service.policies_set[-1] == "locality-band"
    process.send_signal(stop_signal)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert service.policy == OWN
    assert not read_trials(out)
    assert Journal.read(out / JOURNAL)[RESTORE] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rate": 0.0}, "--rate"),
        ({"rate": -2.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"rate": None, "host": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"in_flight": 4}, "either --rate, .* or --in-flight"),
        ({"rate": None, "in_flight": 0}, "--in-flight must be at least 1, got 0"),
        ({"rounds": 0}, "--rounds"),
        ({"trial_seconds": 0}, "--trial-seconds"),
        ({"warm_up_seconds": -1}, "--warm-up-seconds"),
        ({"policies": ""}, "--policies"),
        ({"policies": "random,random"}, "--policies"),
        ({"policies": "random:x"}, "random:x"),
        ({"policies": "random,nearest"}, "nearest"),
        ({"prompts": "nowhere"}, "nowhere"),
        ({"prompts": "empty.jsonl"}, "no prompt"),
        ({"out": ""}, "not empty"),
        ({"host": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"host": "no url"}, "cannot be reached"),
        ({"admin_key_env": "UNSET_KEY"}, "admin key"),
    ],
)
def test_bad_input_is_reported_in_one_sentence_and_changes_nothing(
    service: FakeService, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    change = {key: tmp_path / value if key in ("prompts", "out") else value for key, value in change.items()}
    with pytest.raises((UserInputError, ValueError), match=sentence) as refused:
        compare(**options(service, tmp_path / "c") | change)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]
    assert not service.bodies
    assert service.policy == OWN


def test_a_closed_loop_measures_requests_that_end_in_the_measured_part() -> None:
    sent_s, took_s = (0.0, 0.0, 19.0, 19.5, 12.0), (9.9, 10.0, 0.9, 0.5, None)  # the last one failed
    ended = [
        {"number": n, "due_s": None, "sent_s": sent} | ({} if took is None else {"end_s": took})
        for n, (sent, took) in enumerate(zip(sent_s, took_s, strict=True))
    ]
    assert [r["number"] for r in Trial("random", 0, ended).measured_requests(10, 10)] == [1, 2, 4]


def test_only_steps_of_the_measured_part_are_counted() -> None:
    def sample(unix_s: float, steps: float | None) -> StatusSample:
        return StatusSample(
            unix_s, [1, 2], None if steps is None else {"steps": steps, "active_experts": 20 * steps}
        )

    samples = [sample(t, 10 * t) for t in (1, 2, 3, 4, 5, 6)]
    assert totals_between(samples, 2, 5.5) == {"steps": 30, "active_experts": 600}
    assert totals_between([sample(2.5, None), *samples], 2, 5.5) == {"steps": 30, "active_experts": 600}
    slow_status = [samples[0], samples[4]]
    assert totals_between(slow_status, 2, 5.5) == {"steps": 40, "active_experts": 800}
    for lacking in ([], samples[:2], [sample(3, 5), sample(4, 5)], [sample(3, 50), sample(4, 5)]):
        assert totals_between(lacking, 2, 5.5) is None  # no steps, or a restarted router


def test_a_load_begins_with_its_first_request_or_the_first_busy_sample() -> None:
    samples = [StatusSample(t, [0, in_flight], None) for t, in_flight in ((1.0, 0), (1.5, 2), (2.0, 0))]
    ended = [{"sent_unix_s": 1.4, "sent_s": 0.1}, {"sent_unix_s": 1.7, "sent_s": 0.4}]
    assert load_start_unix_s(ended, samples) == pytest.approx(1.3)
    assert load_start_unix_s([], samples) == 1.5
    assert load_start_unix_s([], samples[:1]) == math.inf


def test_the_best_baseline_is_chosen_figure_by_figure() -> None:
    times = {"random": (0.02, 0.1), "shortest-queue": (0.01, 0.2), "locality-band": (0.009, 0.2)}
    trials = []
    for policy, (tpot_s, ttft_s) in times.items():
        record = {"tpot_s": tpot_s, "ttft_s": ttft_s, "end_s": 1.0, "late_s": 0.0}
        trials.append(Trial(policy, 0, [record | {"number": n, "due_s": float(n)} for n in range(20)]))
    figures = policy_rows(
        list(times), trials, warm_up_s=5, seconds=15, objective=LatencyObjective(150, 50), seed=0
    )
    band = figures[2]
    assert band["requests"] == 15
    assert (band["tpot_p50_ms_baseline"], band["ttft_p50_ms_baseline"]) == ("shortest-queue", "random")
    assert band["tpot_p50_ms_change_pct"] == pytest.approx(-10)
    assert band["ttft_p50_ms_change_pct"] == pytest.approx(100)
    pooled = [row["tpot_p50_ms_pooled_change_pct"] for row in figures]  # half at 10, half at 20 ms
    assert pooled == pytest.approx([100 / 3, -100 / 3, -40])
    assert band["goodput_rps"] == 0
    assert (band["goodput_rps_baseline"], band["goodput_rps_change_pct"]) == ("random", pytest.approx(-100))
    assert band["active_experts"] is None  # nobody reported any


def test_tpot_by_domain_has_the_measured_answers_of_the_policy() -> None:
    def trial(policy: str, factor: float) -> Trial:
        records: list[dict[str, Any]] = [
            {"number": n, "due_s": float(n), "end_s": 1.0, "domain": "fr" if n % 2 else "en"}
            | {"tpot_s": factor * (n % 2 + 1) if n < 16 else None}
            for n in range(20)
        ]
        return Trial(policy, 0, [*records[:-1], records[-1] | {"error": "HTTP 500", "tpot_s": 9.0}])

    trials = [trial("random", 0.01), trial("random", 0.01), trial("marginal-cost", 0.02)]
    assert tpot_by_domain("random", trials, warm_up_s=2, seconds=18) == [
        {"domain": "en", "requests": 14, "tpot_p50_ms": 10.0, "tpot_p99_ms": 10.0},
        {"domain": "fr", "requests": 14, "tpot_p50_ms": 20.0, "tpot_p99_ms": 20.0},
    ]
    ours = tpot_by_domain("marginal-cost", trials, warm_up_s=2, seconds=18)
    assert [row["tpot_p50_ms"] for row in ours] == [20.0, 40.0]


@pytest.mark.parametrize(
    ("status", "summary", "line"),
    [
        (3, "goodput 1.00 requests/s", "{}"),
        (1, "", "{}"),
        (1, "goodput 1.00 requests/s", None),
        (1, "goodput 1.00 requests/s", "{}"),  # requests failed
    ],
)
def test_a_crashed_load_generator_fails_the_trial_with_one_sentence(
    tmp_path: Path, status: int, summary: str, line: str | None
) -> None:
    """A crash of Python exits with 1, as locust does if requests failed. Then there is no summary."""
    log, record = tmp_path / "locust.log", tmp_path / "running.jsonl"
    log.write_text("goodput 9.00 requests/s\n")  # of the previous trial
    record.write_text("of a trial that failed")
    writes = f"open({str(record)!r}, 'w').write({line!r}); " if line else ""
    words = f"{writes}print({summary!r}); print('out of memory'); raise SystemExit({status})"
    command = [sys.executable, "-c", words]
    if status != 3 and summary and line:
        _run_locust(command, record, log, lambda elapsed_s: None)
        assert record.read_text() == line
        return
    with pytest.raises(TrialFailedError, match=rf"^locust ended with status {status}: out of mem") as error:
        _run_locust(command, record, log, lambda elapsed_s: None)
    assert isinstance(error.value, USER_ERRORS)


def test_a_trial_needs_the_routers_leases_and_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, scheduled = client.OperatorClient("http://here"), ScheduledTrial(0, 0, "random", 0)
    load = LoadSpec("p", "m", rate=0.0, seconds=1, warm_up_s=0, users=1, max_tokens=1, temperature=0.0)
    monkeypatch.setattr(service, "set_policy", lambda *policy: None)
    for status, missing in (({"ready": True}, "leases"), ({"leases": 0}, "counters")):
        monkeypatch.setattr(service, "status", lambda status=status: status)
        with pytest.raises(client.ServiceError, match=f"http://here has no {missing}: the router is unreach"):
            run_trial(service, scheduled, load, scratch=tmp_path)
