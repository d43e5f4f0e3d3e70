"""Locust users that stream completions from an OpenAI-compatible endpoint.

    locust -f loadgen/locustfile.py --headless --host http://127.0.0.1:8000 \\
        --prompts prompts/ --rate 4 --users 64 --spawn-rate 64 --run-time 60s --record requests.jsonl

`--rate R` sends R requests/s in all with exponential gaps (Poisson arrivals, as long as a user is
free; give enough users); without it each user sends its next request when the last one ended. One
JSON line a request goes to `--record`. Statistics named `ttft` and `tpot` are in ms.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadgen.sse import StreamError, StreamTiming, read_stream
from loadgen.workload import Prompt, WorkloadError, read_prompts


@events.init_command_line_parser.add_listener
def _arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("eldr workload")
    group.add_argument("--prompts", default="demo_model/prompts", help="JSONL file or folder of prompts")
    group.add_argument("--model", default="eldr-demo", help="model id to ask for")
    group.add_argument("--rate", type=float, default=0.0, help="requests/s in all; 0: closed loop")
    group.add_argument("--max-tokens", type=int, default=64, help="output tokens a request, at most")
    group.add_argument("--ignore-eos", action="store_true", help="generate all of --max-tokens")
    group.add_argument("--temperature", type=float, default=0.8, help="sampling temperature")
    group.add_argument("--record", default="", help="file for one JSON line a request")
    group.add_argument("--seed", type=int, default=0, help="seed of the order of prompts and of arrivals")


class _Workload:
    """The prompts in their order, the arrival times and the record; shared by all users."""

    def __init__(self, options: Any) -> None:
        if options.rate < 0:
            raise WorkloadError(f"--rate is {options.rate}, it must be 0 or more requests/s")
        self.options = options
        self._prompts = read_prompts([Path(options.prompts)])
        self._rng = random.Random(options.seed)
        self._rng.shuffle(self._prompts)
        self._next = 0
        self._due = time.monotonic()
        self._lock = threading.Lock()
        self._record: TextIO | None = open(options.record, "w") if options.record else None  # noqa: SIM115

    def take(self) -> tuple[Prompt, float]:
        """The next prompt, and how long to wait before it is due, s."""
        with self._lock:
            prompt = self._prompts[self._next % len(self._prompts)]
            self._next += 1
            if not self.options.rate:
                return prompt, 0.0
            self._due += self._rng.expovariate(self.options.rate)
            return prompt, max(0.0, self._due - time.monotonic())

    def record(self, line: dict[str, Any]) -> None:
        if self._record is not None:
            with self._lock:
                self._record.write(json.dumps(line) + "\n")
                self._record.flush()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()


_workload: _Workload


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    global _workload
    try:
        _workload = _Workload(environment.parsed_options)
    except WorkloadError as error:
        raise SystemExit(f"locust: {error}") from None


@events.quitting.add_listener
def _quitting(environment: Environment, **_: Any) -> None:
    _workload.close()
    if environment.stats.total.num_failures:
        environment.process_exit_code = 1


class StreamingUser(HttpUser):
    """Sends one completion after the other and times every token."""

    @task
    def complete(self) -> None:
        prompt, wait_s = _workload.take()
        time.sleep(wait_s)
        options = _workload.options
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "seed": options.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        line: dict[str, Any] = {"id": prompt.id, "domain": prompt.domain, "sent_s": time.time()}
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True, name="chat"
        ) as response:
            try:
                if response.status_code != 200:
                    raise StreamError(f"HTTP {response.status_code}: {response.text[:200]}")
                timing = read_stream(response.iter_lines(chunk_size=None), start)
                line |= {
                    "worker": response.headers.get("x-eldr-decode-worker"),
                    "band": response.headers.get("x-eldr-band"),
                }
                self._report(timing, line)
                response.success()
            except (StreamError, OSError) as error:
                line["error"] = str(error)
                response.failure(str(error))
        _workload.record(line)

    def _report(self, timing: StreamTiming, line: dict[str, Any]) -> None:
        line |= {
            "ttft_s": timing.ttft_s,
            "tpot_s": timing.tpot_s,
            "tokens": timing.completion_tokens,
            "end_s": timing.token_times_s[-1] if timing.token_times_s else None,
            "finish_reason": timing.finish_reason,
        }
        for name in ("ttft", "tpot"):
            seconds = line[f"{name}_s"]
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type="STREAM",
                    name=name,
                    response_time=1000 * seconds,
                    response_length=timing.completion_tokens or 0,
                    exception=None,
                    context={},
                )
