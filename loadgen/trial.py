"""One trial of a comparison: a stretch of load under one policy, on engines that keep running."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eldr_serve.commands.client import OperatorClient, ServiceError, parse_parameters
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import policy_names
from loadgen.journal import Journal

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
JOURNAL = "journal.jsonl"  # file name in the folder of a comparison
_SUMMARY = "goodput "  # beginning of the last line that loadgen.locustfile prints about a load
RESTORE = "restore"  # journal key of the server's own policy; its value is None after the policy was restored


class TrialFailedError(ChildProcessError):
    """The load generator has failed; the message is one sentence."""


@dataclass(frozen=True)
class LoadSpec:
    """The load of every trial."""

    prompts: str
    model: str
    rate: float  # requests/s; 0 for a closed loop
    seconds: int  # duration of the measured part
    warm_up_s: int  # load before the measured part
    users: int  # maximum requests in flight; constant in a closed loop
    max_tokens: int
    temperature: float
    min_tokens: int = 0  # output tokens are drawn uniformly from this to max_tokens; 0: always max_tokens
    abandon: bool = False  # do not wait for incomplete answers at the end


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse `locality-band:band=0.1` into ("locality-band", {"band": 0.1}). Colons separate parameters."""
    name, *pairs = text.split(":")
    if pairs and "=" not in pairs[0] and name not in policy_names():  # my_package.module:MyPolicy
        name = f"{name}:{pairs.pop(0)}"
    try:
        return name, parse_parameters(pairs)
    except ValueError as error:
        raise UserInputError(f"{text!r} is not a policy: write name:parameter=value") from error


@dataclass
class Trial:
    """The results of a trial."""

    policy: str
    round: int
    requests: list[dict[str, Any]] = field(default_factory=list)  # records of loadgen.locustfile
    engines: dict[str, float] | None = None  # increase of OperatorClient.decode_totals in the measured part
    placed: int = 0
    best: int = 0  # placements on the worker most similar to the signature
    load: list[tuple[float, list[int]]] = field(default_factory=list)  # s, requests in flight by worker

    def measured_requests(self, warm_up_s: float, seconds: float) -> list[dict[str, Any]]:
        """Return the requests that were due after the warm-up, or in a closed loop those that ended in time.

        The last answers of a closed loop are not measured, since they run with ever fewer others.
        """
        records = []
        for record in self.requests:
            due_s, until_s = record["due_s"], math.inf
            if due_s is None:
                due_s, until_s = record["sent_s"] + (record.get("end_s") or 0.0), warm_up_s + seconds
            if warm_up_s <= due_s < until_s:
                records.append(record)
        return records


@dataclass(frozen=True)
class ScheduledTrial:
    """One trial to run."""

    number: int
    round: int
    policy: str
    seed: int  # equal for all policies of a round, which therefore get the same requests

    @property
    def key(self) -> str:
        """Return the key of its trial in the journal."""
        return f"trial {self.number:04d}, {self.policy}"


def schedule_trials(policies: list[str], rounds: int, seed: int) -> list[ScheduledTrial]:
    """Return randomised trials: each round has every policy once, in its own order."""
    rng = random.Random(f"{seed}/order")
    scheduled: list[ScheduledTrial] = []
    for number in range(rounds):
        for policy in rng.sample(policies, len(policies)):
            scheduled.append(ScheduledTrial(len(scheduled), number, policy, 1000 * seed + number))
    return scheduled


def read_trials(folder: Path) -> list[Trial]:
    """Read the finished trials of the comparison in a folder.

    Raises:
        UserInputError: there are none.
    """
    entries = Journal.read(folder / JOURNAL)
    return [Trial(**entries[key]) for key in sorted(entries) if key != RESTORE]


def run_trial(
    service: OperatorClient,
    scheduled: ScheduledTrial,
    load: LoadSpec,
    *,
    scratch: Path,
    tick: Callable[[float], None] = lambda elapsed_s: None,
) -> Trial:
    """Set the policy, send the load, wait for all answers, and return the results.

    Args:
        scheduled: the trial. The same seed sends the same requests at the same times.
        scratch: folder for locust's log and record.
        tick: called about twice per second with the seconds since the load began.

    Raises:
        UserInputError: the server refused the policy.
        TrialFailedError: locust could not run.
    """
    service.set_policy(*parse_policy(scheduled.policy))
    service.wait_idle()
    counters_before = service.router_value("counters")
    record, log = scratch.resolve() / "running.jsonl", scratch.resolve() / "locust.log"
    with _sample_status(service) as samples:
        _run_locust(_command(service.url, load, scheduled.seed, record), record, log, tick)
    service.wait_idle()
    counters_after = service.router_value("counters")
    requests = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    placed, best = (
        counters_after.get(name, 0) - counters_before.get(name, 0)
        for name in ("placed", "most_similar_worker")
    )
    start_s = load_start_unix_s(requests, samples)
    in_flight = [(s.unix_s - start_s, s.in_flight) for s in samples if s.unix_s >= start_s]
    from_s = start_s + load.warm_up_s
    engines = totals_between(samples, from_s, from_s + load.seconds)
    return Trial(scheduled.policy, scheduled.round, requests, engines, placed, best, in_flight)


@dataclass(frozen=True)
class StatusSample:
    """Values from the service's status at one time."""

    unix_s: float
    in_flight: list[int]  # requests of each worker
    totals: dict[str, float] | None  # OperatorClient.decode_totals


def load_start_unix_s(requests: list[dict[str, Any]], samples: list[StatusSample]) -> float:
    """Return the time at which a load began on an idle service, s since 1970, or infinity if it never did.

    On a slow machine no request of a short closed loop may end. Then the first busy sample is the start.
    """
    busy_s = next((sample.unix_s for sample in samples if any(sample.in_flight)), math.inf)
    return min((r["sent_unix_s"] - r["sent_s"] for r in requests), default=busy_s)


def totals_between(samples: list[StatusSample], from_s: float, until_s: float) -> dict[str, float] | None:
    """Return the increase of the totals between the first and the last sample of a period.

    If the status was so slow that only one sample lies in the period, in its second half, the last sample
    before the period is the first.
    Decode engines report once per second, so the result includes up to a second of steps before the period,
    and lacks up to a second at its end. Return None if no step was reported or the router lost its totals.
    """
    with_totals = [(s.unix_s, s.totals) for s in samples if s.unix_s <= until_s and s.totals]
    inside = [totals for unix_s, totals in with_totals if unix_s >= from_s]
    if len(inside) == 1 and with_totals[-1][0] >= (from_s + until_s) / 2:
        inside = [totals for _, totals in with_totals[-2:]]
    if not inside or inside[-1]["steps"] <= inside[0]["steps"]:
        return None
    return {key: inside[-1][key] - inside[0][key] for key in inside[0]}


def _command(url: str, load: LoadSpec, seed: int, record: Path) -> list[str]:
    options = {
        "--host": url,
        "--prompts": Path(load.prompts).resolve(),
        "--model": load.model,
        "--rate": load.rate,
        "--users": load.users,
        "--spawn-rate": load.users if load.rate else 2 * load.users / max(1, load.warm_up_s),
        "--run-time": f"{load.warm_up_s + load.seconds}s",
        "--max-tokens": load.max_tokens,
        "--min-tokens": load.min_tokens,
        "--temperature": load.temperature,
        "--record": record,
        # Other trials sent the same prompts: a shared prefix cache would put the first one at a disadvantage.
        "--cache-salt": uuid.uuid4().hex,
        "--seed": seed,
        "--sampling-seed": seed,
    }
    flags = ["--headless", "--ignore-eos", "--only-summary", *["--abandon"] * load.abandon]
    pairs = [str(part) for option in options.items() for part in option]
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *flags, *pairs]


def _run_locust(command: list[str], record: Path, log: Path, tick: Callable[[float], None]) -> None:
    record.unlink(missing_ok=True)  # that of a trial that failed
    start = time.perf_counter()
    with log.open("a") as file:
        size = file.tell()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=LOCUSTFILE.parents[1])
        try:
            while process.poll() is None:
                time.sleep(0.5)
                tick(time.perf_counter() - start)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    output = log.read_bytes()[size:].decode(errors="replace").strip().splitlines() or ["nothing"]
    # Status 1 means that requests failed, as their records say, or that locust crashed, without a summary.
    has_ended = record.exists() and any(line.startswith(_SUMMARY) for line in output)
    if process.returncode not in (0, 1) or not has_ended:
        raise TrialFailedError(f"locust ended with status {process.returncode}: {output[-1]} (see {log})")


@contextmanager
def _sample_status(service: OperatorClient) -> Iterator[list[StatusSample]]:
    """Sample the status twice per second until the end of the block."""
    samples: list[StatusSample] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            try:
                status = service.status()
            except ServiceError:
                continue  # this leaves a gap in a plot
            in_flight = [worker["in_flight"] for worker in status.get("workers", [])]
            samples.append(StatusSample(time.time(), in_flight, service.decode_totals(status)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield samples
    finally:
        stop.set()
        watcher.join(2)  # it may be waiting for an answer
