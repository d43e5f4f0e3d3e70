"""Locust users that stream completions from an OpenAI-compatible endpoint.

    locust -f loadgen/locustfile.py --headless --host http://127.0.0.1:8000 \\
        --prompts prompts/ --rate 4 --users 64 --spawn-rate 64 --run-time 60s --record requests.jsonl

In an open loop, `--rate R` sends R requests/s with exponential gaps, or `--trace FILE` replays a trace.
Requests are sent when they are due, however slow the server is, as long as one of `--users` is free. The
record says how late each request was sent. Without either option the loop is closed: each user sends its next
request when its last one has ended.

All requests that are due within `--run-time`, or the whole trace, are sent. The run ends with the last
answer, or with `--abandon` at once. With `--master` and `--worker` each worker sends its share.

`--record` gets one JSON line per request when the request ends. Times are in s: due_s, sent_s and late_s from
the start of the load, sent_unix_s since 1970, and the others from the sending of the request. Statistics of
type STREAM are in ms.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any
from urllib.parse import quote

import gevent
from gevent import GreenletExit
from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner, Runner, WorkerRunner

from eldr_serve.errors import UserInputError
from loadgen.arrivals import Arrival
from loadgen.load import Load, describe_run
from loadgen.sse import StreamError, StreamTiming, read_stream

_STREAM_STATS = ("late", "ttft", "tpot", "end", "handover")
_TIMEOUT_S = 300  # maximum time without a byte, s


# Name, default, help. Each default has the option's type, since locust's page converts changed values to it.
_OPTIONS: tuple[tuple[str, str | int | float, str], ...] = (
    ("prompts", "examples/demo_model/prompts", "JSONL file or folder of prompts"),
    ("model", "eldr-demo", "model id to request"),
    ("rate", 0.0, "total requests/s; 0: closed loop"),
    ("trace", "", "trace to replay: .csv[.gz] (Azure) or .jsonl[.gz] (Mooncake)"),
    ("trace-speed", 1.0, "replay speed, relative to the recording"),
    ("max-prompt-tokens", 0, "scale a trace's prompts so that the longest has this length; 0: as recorded"),
    ("chars-per-token", 4.0, "characters per token, for a trace"),
    ("max-tokens", 64, "maximum output tokens of a request; 0 with a trace: as recorded"),
    ("min-tokens", 0, "draw a request's output tokens from this to --max-tokens; 0: always --max-tokens"),
    ("temperature", 0.8, "sampling temperature"),
    ("cache-salt", "", "vLLM's cache_salt: do not share prefixes with other load"),
    ("slo-ttft-ms", 1000.0, "objective of goodput: TTFT, ms"),
    ("slo-tpot-ms", 100.0, "objective of goodput: TPOT, ms"),
    ("record", "", "file for one JSON line per request"),
    ("seed", 0, "seed for the order of prompts and for arrivals"),
    ("sampling-seed", -1, "seed of each request's sampling; -1: none, since streams with one cannot resume"),
)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Add this generator's options to locust's."""
    group = parser.add_argument_group("eldr workload")
    for name, default, text in _OPTIONS:
        group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    group.add_argument("--ignore-eos", action="store_true", help="generate all output tokens")
    group.add_argument(
        "--abandon",
        action="store_true",
        help="at the end of a closed loop, disconnect from incomplete answers and do not record them",
    )


class _Session:
    """The state of the run in this process: its load, its share and, on a master, the workers' counts."""

    load: Load | None = None
    index = 0
    processes = 1
    horizon_s: float | None = None
    summarised = False
    good: dict[str, int]
    finished: set[str]

    def __init__(self) -> None:
        self.good, self.finished = {}, set()


_session = _Session()


def _runner(environment: Environment) -> Runner:
    """Return the runner, which locust sets before the first event."""
    assert environment.runner is not None
    return environment.runner


def _options(environment: Environment) -> Namespace:
    """Return the options, which locust also sets before the first event."""
    options: Namespace | None = environment.parsed_options
    assert options is not None
    return options


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    runner, options = _runner(environment), _options(environment)
    if isinstance(runner, WorkerRunner):
        runner.register_message("eldr_share", _take_share)
        return
    if isinstance(runner, MasterRunner):
        runner.register_message("eldr_done", _worker_done)
    try:
        # Reads all input, so that bad input ends the command before a request is sent.
        Load(_remove_record(options) if isinstance(runner, MasterRunner) else options).close()
    except UserInputError as error:
        print(f"locust: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.headless:
        # Locust would stop users that wait for an arrival or an answer.
        _session.horizon_s, options.run_time = options.run_time, None


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    runner, options = _runner(environment), _options(environment)
    _session.good, _session.finished, _session.summarised = {}, set(), False
    if not (isinstance(runner, WorkerRunner) or options.headless):
        _session.horizon_s = options.run_time or None
    if isinstance(runner, MasterRunner):
        clients = sorted(runner.clients)
        _session.processes = len(clients)
        for index, client in enumerate(clients):
            share = {"index": index, "processes": len(clients), "horizon_s": _session.horizon_s}
            runner.send_message("eldr_share", share, client_id=client)
        return
    try:
        _session.load = Load(
            options, index=_session.index, processes=_session.processes, horizon_s=_session.horizon_s
        )
    except UserInputError as error:
        print(f"locust: {error}", file=sys.stderr)
        environment.process_exit_code = 2
        runner.quit()
        return
    if not (options.rate or options.trace):
        _session.load.begin()  # requests have no due times, so users may start one by one
        if options.abandon and _session.horizon_s:
            gevent.spawn_later(_session.horizon_s, _end, environment)


@events.spawning_complete.add_listener
def _start_clock(user_count: int, **_: Any) -> None:
    if _session.load:
        _session.load.begin()


def _take_share(environment: Environment, msg: Any, **_: Any) -> None:
    _session.index, _session.processes = msg.data["index"], msg.data["processes"]
    _session.horizon_s = msg.data["horizon_s"]


def _worker_done(environment: Environment, msg: Any, **_: Any) -> None:
    _session.finished.add(msg.node_id)
    if len(_session.finished) == _session.processes:
        _end(environment)


def _end(environment: Environment) -> None:
    """End a finite load. Without --headless the next one may be started on locust's page."""
    runner = _runner(environment)
    # In a greenlet of its own, since it kills the users' greenlets.
    gevent.spawn(runner.quit if _options(environment).headless else runner.stop)


@events.report_to_master.add_listener
def _report_good(client_id: str, data: dict[str, Any]) -> None:
    data["eldr_good"] = _session.load.good if _session.load else 0


@events.worker_report.add_listener
def _receive_good(client_id: str, data: dict[str, Any]) -> None:
    _session.good[client_id] = data.get("eldr_good", 0)


@events.test_stop.add_listener
def _close_load(environment: Environment, **_: Any) -> None:
    if _session.load:
        _session.load.close()
    if isinstance(environment.runner, LocalRunner):
        _summarise(environment)


@events.quitting.add_listener
def _end_run(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, MasterRunner):
        _summarise(environment)  # only now have all workers sent their last report
    if environment.stats.total.num_failures and not environment.process_exit_code:
        environment.process_exit_code = 1


def _summarise(environment: Environment) -> None:
    """Print the verdict once per load."""
    if _session.summarised:
        return
    _session.summarised = True
    stats, options = environment.stats, _options(environment)
    requests, late = stats.get("chat", "POST"), stats.get("late", "STREAM")
    late_p99_s = late.get_response_time_percentile(0.99) / 1000 if late.num_requests else None
    print(describe_run(requests=requests.num_requests, failed=requests.num_failures, late_p99_s=late_p99_s))
    good = _session.load.good if _session.load else sum(_session.good.values())
    seconds = (stats.last_request_timestamp or 0) - (stats.start_time or 0)
    print(
        f"goodput {good / seconds if seconds > 0 else 0:.2f} requests/s "
        f"(TTFT within {options.slo_ttft_ms:g} ms and TPOT within {options.slo_tpot_ms:g} ms)"
    )


class StreamingUser(HttpUser):
    """A user that sends one completion after the other and times every token."""

    @task
    def complete(self) -> None:
        load = _session.load
        if load is None:  # the load could not begin
            raise StopUser
        arrival = load.take()
        if arrival is None:
            self._end_if_last(load)
            raise StopUser
        line: dict[str, Any] = {
            "number": arrival.number,
            "id": arrival.prompt.id,
            "domain": arrival.prompt.domain,
            "due_s": arrival.due_s,
            "sent_s": load.now_s(),
            "sent_unix_s": time.time(),
        }
        line["late_s"] = None if arrival.due_s is None else line["sent_s"] - arrival.due_s
        abandoned = False
        try:
            self._send(load, arrival, line)
        except GreenletExit:
            line["error"] = "the run was stopped before the answer ended"
            abandoned = load.options.abandon
            raise
        finally:
            if not abandoned:
                load.record_end(line)
                self._log(line)
                self._end_if_last(load)

    def _send(self, load: Load, arrival: Arrival, line: dict[str, Any]) -> None:
        options = load.options
        body = {
            "model": options.model,
            "messages": arrival.prompt.chat,
            "max_tokens": arrival.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": options.cache_salt} if options.cache_salt else {}),
            **({"seed": options.sampling_seed} if options.sampling_seed >= 0 else {}),
        }
        start = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions",
            json=body,
            headers={"x-eldr-domain": quote(arrival.prompt.domain)} if arrival.prompt.domain else {},
            stream=True,
            timeout=_TIMEOUT_S,
            catch_response=True,
            name="chat",
        ) as response:
            try:
                if response.error:
                    raise StreamError(str(response.error))
                if response.status_code != 200:
                    raise StreamError(f"HTTP {response.status_code}: {response.text[:200]}")
                line |= _from_headers(response.headers)
                line |= _times(read_stream(response.iter_lines(chunk_size=None), start))
                response.success()
            except (StreamError, OSError) as error:
                line["error"] = str(error)
                response.failure(str(error))

    def _log(self, line: dict[str, Any]) -> None:
        for name in _STREAM_STATS:
            seconds = line.get(f"{name}_s")
            if seconds is not None:
                ms: Any = 1000 * seconds  # locust's annotation says int, but fractions are kept
                # Do not fire a request event: locust's "Aggregated" row would count an additional request.
                self.environment.stats.get(name, "STREAM").log(ms, line.get("tokens") or 0)

    def _end_if_last(self, load: Load) -> None:
        runner = self.environment.runner
        if not load.report_end_once():
            return
        if isinstance(runner, WorkerRunner):
            runner.send_message("eldr_done", {})
        else:
            _end(self.environment)


def _from_headers(headers: Any) -> dict[str, Any]:
    handover_ms = headers.get("x-eldr-handover-ms")
    return {
        "worker": headers.get("x-eldr-decode-worker"),
        "num_candidates": headers.get("x-eldr-candidates"),
        "policy": headers.get("x-eldr-policy"),
        "handover_s": None if handover_ms is None else float(handover_ms) / 1000,
    }


def _times(timing: StreamTiming) -> dict[str, Any]:
    return {
        "ttft_s": timing.ttft_s,
        "tpot_s": timing.tpot_s,
        "itl_s": [round(gap, 6) for gap in timing.chunk_gaps_s],
        "end_s": timing.end_s,
        "tokens": timing.completion_tokens,
        "prompt_tokens": timing.prompt_tokens,
        "finish_reason": timing.finish_reason,
    }


def _remove_record(options: Any) -> Any:
    return type(options)(**{**vars(options), "record": ""})
