"""The running application, as seen by a client and an operator."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.lib.prometheus import total
from tests.support.processes import output

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples/demo_model/prompts"
ADMIN_KEY = "demo"
GREEDY = {"max_tokens": 24, "temperature": 0}  # `single_engine` uses the same
# Loading certificates, which no test needs, would take 30 ms of a core for each client.
ONE_CONNECTION_EACH = httpx.Limits(max_keepalive_connections=0)
HTTP = httpx.Client(verify=False, timeout=60, limits=ONE_CONNECTION_EACH)
QUEUE_TIMEOUT_S = 12.0  # longer than a busy machine needs for a queue of short answers
# The file of a third-party policy, outside the repository; the demo starts with its folder on PYTHONPATH.
STRANGER = Path(tempfile.gettempdir()) / f"eldr_stranger_{os.getpid()}" / "stranger_policy.py"
STOP_WAIT_S = 0.1  # wait of an idle replica that is to stop; by default Serve's replicas wait for 2 s
# For plain engines of vLLM, which the demo's answers are compared with.
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # then vLLM is imported once
}


@dataclass(frozen=True)
class Demo:
    """The README's first command with small settings, which serves on after its report.

    Attributes:
        log: file with its output.
        out: its folder of results.
    """

    process: subprocess.Popen[str]
    log: Path
    out: Path
    url: str

    @property
    def dashboard(self) -> str:
        """Return the address of its Ray cluster's dashboard."""
        address = re.search(r"dashboard: (http://\S+)", self.log.read_text())
        assert address is not None
        return address[1]

    def wait_for_line(self, words: str) -> None:
        """Wait until the demo has printed `words`."""
        wait_for(
            lambda: words in self.log.read_text() or self.process.poll() is not None,
            f"the demo prints {words!r}",
            600,
        )
        if self.process.poll() is not None:
            output = self.log.read_text()[-5000:]
            last = (output.strip().splitlines() or ["nothing was printed"])[-1]  # pytest's summary shows it
            raise AssertionError(f"the demo ended with status {self.process.returncode}: {last}\n{output}")

    def stop(self) -> None:
        """Stop it like Ctrl-C."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


class Background:
    """A command that runs during the tests, as a context that stops it at the end."""

    def __init__(self, command: list[str], output: Path, env: dict[str, str]) -> None:
        self._output = output
        with output.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | env
            )

    def finished(self) -> None:
        """Wait for its successful end."""
        self._process.wait(400)
        assert self._process.returncode == 0, self._output.read_text()[-5000:]

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Service:
    """The running application, as seen by a client and an operator."""

    url: str

    @cached_property
    def client(self) -> openai.OpenAI:
        url = f"{self.url}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120, http_client=HTTP)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        """Return a client for one event loop."""
        http = openai.DefaultAsyncHttpxClient(verify=False, limits=ONE_CONNECTION_EACH)
        url = f"{self.url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300, http_client=http)

    def status(self) -> dict[str, Any]:
        answer = self.admin("GET", "/eldr/status")
        return answer.raise_for_status().json()

    def counter(self, name: str) -> int:
        return self.status()["counters"].get(name, 0)

    def settled_counters(self, *names: str, constant_s: float = 1.0) -> list[int]:
        """Return counters once all are constant for so long; ingresses report theirs every 0.25 s.

        A restarted router gets older counts late: then wait for 3 s.
        """

        def read() -> list[int]:
            counters = self.status()["counters"]
            return [counters.get(name, 0) for name in names]

        values, since = read(), time.monotonic()
        while time.monotonic() < since + constant_s:
            time.sleep(0.2)
            if (now := read()) != values:
                values, since = now, time.monotonic()
        return values

    def decodes(self) -> set[str]:
        """Return the ids of the decode replicas that get requests."""
        return {worker["worker"] for worker in self.status()["workers"]}

    def complete(self, prompt: Any, **fields: Any) -> Any:
        return self.client.completions.create(model="eldr-demo", prompt=prompt, **fields)

    def greedy(self, prompt: str) -> str:
        return self.complete(prompt, **GREEDY).choices[0].text

    def greedy_chat(self, prompt: str) -> str:
        """Return a greedy answer to a chat, streamed."""
        chunks = self.client.chat.completions.create(
            model="eldr-demo", messages=[{"role": "user", "content": prompt}], stream=True, **GREEDY
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    async def greedy_async(self, prompt: str, **fields: Any) -> str:
        answer = await self.async_client.completions.create(
            model="eldr-demo", prompt=prompt, extra_body=fields, **GREEDY
        )
        return answer.choices[0].text

    @asynccontextmanager
    async def post(self, body: dict[str, Any], path: str = "completions") -> AsyncIterator[httpx.Response]:
        """Send a request over its own connection, and yield the answer before its body is read."""
        async with (
            httpx.AsyncClient(verify=False, timeout=200) as client,
            client.stream("POST", f"{self.url}/v1/{path}", json=body) as response,
        ):
            yield response

    def whole(self) -> bool:
        """Return whether Serve has replaced all dead replicas and every pair of engines is warm."""
        status = self.status()
        return len(status.get("workers", [])) == 2 and status["ingress"]["all_warm"]

    def admin(self, method: str, path: str, key: str | None = ADMIN_KEY, **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return HTTP.request(method, f"{self.url}{path}", headers=headers, **kwargs)

    def set_policy(self, name: str, **parameters: Any) -> None:
        answer = self.admin("PUT", "/eldr/policy", json={"name": name, "parameters": parameters})
        assert answer.status_code == 200, answer.text

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples over all processes, from Ray's own endpoint."""
        return total(self.metrics(), f"ray_{name}")

    def kv_usage(self) -> float:
        """Return the share of KV blocks in use, summed over all engines, up to two seconds old."""
        ingress = self.status()["ingress"]
        return sum([*ingress["prefill_kv_usage"].values(), *ingress["decode_kv_usage"].values()])

    def wait_empty(self, within_s: float = 15.0) -> None:
        """Wait until no engine holds a block. A prompt that is never released stays for 30 s."""
        time.sleep(3)  # skip older samples
        wait_for(lambda: self.kv_usage() == 0.0, "the engines are empty", within_s - 3)

    def metrics(self) -> str:
        """Return all text of Ray's metrics port."""
        import ray

        port = ray.nodes()[0]["MetricsExportPort"]
        return HTTP.get(f"http://127.0.0.1:{port}/metrics").text


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the events of a streamed answer, as they arrive."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def session_logs() -> Path:
    """Return the folder of the newest Ray session's logs."""
    return Path(tempfile.gettempdir(), "ray", "session_latest", "logs").resolve()


def controller_log() -> str:
    """Return the logs of all controllers of Serve, that of the running one last."""
    files = sorted(session_logs().glob("serve/controller*.log"), key=lambda file: file.stat().st_mtime)
    return "".join(file.read_text(errors="replace") for file in files)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds. Fail the test with `what` on timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    pytest.fail(f"not within {timeout_s} s: {what}")


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait like wait_for, in a test whose own event loop runs requests."""
    await asyncio.to_thread(wait_for, condition, what, timeout_s)


def run(*arguments: object, **options: Any) -> str:
    """Run Python like `processes.output`."""
    return output(sys.executable, *arguments, **options)


def pid_of(replica: str) -> int:
    """Return the id of the replica's process, the parent of its engine's."""
    import ray
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address  # there may be other clusters on this machine
    alive = list_actors(address, filters=[("state", "=", "ALIVE")])
    return next(actor for actor in alive if replica in (actor.name or "")).pid


def core_of(replica: str) -> int:
    """Return the process of its engine's core, which schedules and computes."""
    (core,) = (
        child
        for child in psutil.Process(pid_of(replica)).children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    )
    return core.pid


AGENT_PORT = 52365  # port of Ray's job agent, which no argument of ray.init changes


def submit_job(dashboard: str, command: list[str], output: Path) -> Background:
    """Run `ray job submit`, which waits for the job's end.

    Ray accepts no job until its agent runs, some time after the dashboard.
    """
    submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", dashboard]
    probe = [*submit, "--no-wait", "--", "true"]
    wait_for(
        lambda: subprocess.run(probe, capture_output=True).returncode == 0, "Ray's job agent is available"
    )
    return Background([*submit, "--", *command], output, {"RAY_ADDRESS": dashboard})
