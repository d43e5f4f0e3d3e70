"""Locust users against a real local HTTP server whose delays are known."""

import itertools
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from benchmarks.lib.ports import free_port
from loadgen.arrivals import poisson
from tests.support.fake_service import REPLICAS, FakeService
from tests.support.processes import run_command
from tests.support.shipped import ROOT

pytestmark = pytest.mark.slow  # each test starts processes
BASE = [sys.executable, "-m", "locust", "-f", "loadgen/locustfile.py"]


def locust(
    service: FakeService, out: Path, users: int, *options: object, status: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run locust to its end with this status, and return the process, and its records by number."""
    record = out / "record.jsonl"
    words = [*BASE, "--headless", "--only-summary", "--host", service.url, "--record", record]
    words += ["--max-tokens", 6, "--users", users, "--spawn-rate", users, *options]
    done = run_command(*words, timeout_s=100)
    assert done.returncode == status, done.stdout + done.stderr
    lines = record.read_text().splitlines() if record.exists() else []
    return done, sorted(map(json.loads, lines), key=lambda r: r["number"])


def test_an_open_loop_sends_by_the_clock_and_records_every_request(
    service: FakeService, tmp_path: Path
) -> None:
    page = tmp_path / "locust.html"
    done, records = locust(
        service, tmp_path, 48, "--rate", 12, "--run-time", "4s", "--seed", 3, "--ignore-eos", "--html", page
    )
    due = list(itertools.takewhile(lambda t: t < 4, poisson(12, seed=3)))
    assert [r["due_s"] for r in records] == pytest.approx(due)
    assert f"{len(due)} requests, none failed" in done.stdout
    assert "goodput" in done.stdout
    for record in records:
        assert record["late_s"] == pytest.approx(record["sent_s"] - record["due_s"])
        assert record["late_s"] >= 0
        assert record["ttft_s"] >= service.first_s
        assert record["end_s"] >= service.first_s + 5 * service.gap_s
        assert record["tpot_s"] == pytest.approx((record["end_s"] - record["ttft_s"]) / 5)
        assert (len(record["itl_s"]), record["tokens"]) == (5, 6)
        assert record["handover_s"] == pytest.approx(0.0125)
        assert (record["worker"], record["policy"]) == (REPLICAS[0], "locality-band")
    # The server received the requests at the times of the records. A busy machine may delay some.
    gaps_s = np.diff(sorted(service.arrived_s))
    assert np.median(np.abs(gaps_s - np.diff(sorted(r["sent_s"] for r in records)))) < 0.05
    assert all(body["ignore_eos"] and "seed" not in body for body in service.bodies)
    assert "ttft" in page.read_text()
    # The sum covers only requests; times within a request have their own rows.
    rows = re.findall(r"^\s*(?:POST|STREAM)?\s+(chat|ttft|Aggregated) +(\d+)", done.stderr, re.MULTILINE)
    rows_by_name = dict(rows[:3])  # a table of percentiles follows
    assert rows_by_name == dict.fromkeys(("chat", "ttft", "Aggregated"), str(len(due)))


def test_too_few_users_and_failures_are_in_the_first_line(service: FakeService, tmp_path: Path) -> None:
    service.first_s = 0.5
    done, records = locust(service, tmp_path, 2, "--rate", 10, "--run-time", "2s")
    assert "USERS RAN OUT" in done.stdout.splitlines()[0]
    assert max(r["late_s"] for r in records) > 0.3
    service.first_s, service.fail_every = 0.05, 3
    service.bodies.clear()
    done, records = locust(
        service, tmp_path, 16, "--rate", 10, "--run-time", "2s", "--sampling-seed", 5, status=1
    )
    assert {body["seed"] for body in service.bodies} == {5}
    failed = [r for r in records if "error" in r]
    assert len(failed) == len(records) // 3
    assert f"{len(failed)} FAILED" in done.stdout.splitlines()[0]
    assert all("HTTP 503" in r["error"] for r in failed)


def test_a_closed_loop_keeps_every_user_busy(service: FakeService, tmp_path: Path) -> None:
    _, records = locust(service, tmp_path, 3, "--run-time", "2s")
    assert {r["due_s"] for r in records} == {None}
    # Until 2 s a user sends a request after each answer. Then it waits for its last answer.
    assert max(r["sent_s"] for r in records) < 2.0 < max(r["sent_s"] + r["end_s"] for r in records)
    busy_s = sum(max(0.0, min(1.8, r["sent_s"] + r["end_s"]) - max(0.2, r["sent_s"])) for r in records)
    assert 0.75 * 3 < busy_s / 1.6 <= 3


def test_an_abandoned_tail_is_neither_awaited_nor_a_failure(service: FakeService, tmp_path: Path) -> None:
    service.gap_s = 0.3  # an answer takes 1.55 s, so the second ones are incomplete at the end
    done, records = locust(service, tmp_path, 3, "--run-time", "3s", "--abandon")
    assert "none failed" in done.stdout
    assert all(record["tokens"] == 6 for record in records)
    assert 0 < len(records) < len(service.bodies)
    _wait(lambda: service.in_flight == 0)


def test_a_trace_is_replayed_to_its_end(service: FakeService, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp_ms": 500 * n, "prompt_tokens": 700, "output_tokens": 3 + n, "hash_ids": [0, n + 1]}
        for n in range(5)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, records = locust(
        service, tmp_path, 8, "--trace", trace, "--trace-speed", 2, "--max-prompt-tokens", 350
    )
    assert [r["due_s"] for r in records] == [0, 0.25, 0.5, 0.75, 1]
    assert sorted(r["tokens"] for r in records) == [3, 4, 5, 6, 6]
    texts = [body["messages"][0]["content"] for body in service.bodies]
    assert {len(t) for t in texts} == {1400}
    assert len({t[:1000] for t in texts}) == 1  # the shared block
    assert len(set(texts)) == 5


def test_two_workers_send_the_requests_of_one(service: FakeService, tmp_path: Path) -> None:
    port = str(free_port())
    workers = [subprocess.Popen([*BASE, "--worker", "--master-port", port], cwd=ROOT) for _ in range(2)]
    try:
        done, _ = locust(
            service,
            tmp_path,
            20,
            "--master",
            "--expect-workers",
            2,
            "--master-bind-port",
            port,
            "--rate",
            10,
            "--run-time",
            "3s",
            "--seed",
            9,
        )
        for worker in workers:
            worker.wait(60)
    finally:
        for worker in workers:
            worker.kill()
    texts = [(tmp_path / f"record.{n}.jsonl").read_text() for n in (0, 1)]
    parts = [list(map(json.loads, text.splitlines())) for text in texts]
    due = list(itertools.takewhile(lambda t: t < 3, poisson(10, seed=9)))
    assert sorted(r["due_s"] for part in parts for r in part) == pytest.approx(due)
    assert [{r["number"] % 2 for r in part} for part in parts] == [{0}, {1}]
    assert not {r["id"] for r in parts[0]} & {r["id"] for r in parts[1]}
    assert f"{len(due)} requests, none failed" in done.stdout


@pytest.mark.parametrize("options", ["--rate=nan", "--record=nowhere/record.jsonl"])
def test_bad_input_is_reported_in_one_sentence_and_sends_nothing(
    service: FakeService, tmp_path: Path, options: str
) -> None:
    done, _ = locust(service, tmp_path, 1, "--run-time", "2s", options, status=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("locust: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not service.bodies


def test_locusts_web_page_can_start_several_loads(service: FakeService, tmp_path: Path) -> None:
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [
            *BASE,
            f"--host={service.url}",
            "--web-host=127.0.0.1",
            f"--web-port={port}",
            "--stop-timeout=20",
            f"--record={tmp_path / 'record.jsonl'}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def stats() -> dict[str, Any]:
        return requests.get(f"{page}/stats/requests", timeout=10).json()

    try:
        _wait(lambda: _listens(port))
        for rate in (20, 10):
            # Locust's page is up to 2 s old: a shorter run might never be seen running.
            form = {"user_count": 16, "spawn_rate": 16, "rate": rate, "max_tokens": 3, "run_time": "5s"}
            answer = requests.post(f"{page}/swarm", data=form, timeout=10)
            assert answer.json()["success"], answer.text
            _wait(lambda: stats()["state"] == "running")
            _wait(lambda: stats()["state"] == "stopped")
            numbers = {s["name"]: s["num_requests"] for s in stats()["stats"]}
            assert rate * 5 * 0.4 < numbers["chat"] < rate * 5 * 1.5
            assert numbers["ttft"] == numbers["tpot"] == numbers["late"] == numbers["chat"]
            assert "ttft" in requests.get(f"{page}/stats/report", timeout=10).text
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert output.count("none failed") == 2, output


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _wait(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
