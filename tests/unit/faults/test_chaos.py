"""The chaos command: classification of answers, injection of faults, and the record of a run."""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import ray.cluster_utils
from ray.serve.exceptions import RayServeException

from eldr_serve.commands.client import ServiceError
from eldr_serve.errors import UserInputError
from loadgen import application, processes
from loadgen.workload import WorkloadPrompt
from tests.faults import __main__ as command
from tests.faults import chaos, operations
from tests.faults.nodes import INGRESS_ACTOR, separate_nodes
from tests.faults.operations import FaultInjector, InjectedFault, Run, explained_by_fault
from tests.faults.record import Record, find_problems, rows
from tests.faults.traffic import Answer, Sent, bodies, check_answer

ANSWER = Answer(text="one two three", finish="length", usage=(5, 3), done=True)
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text_event(
    text: str, finish: str | None = None, name: str = "a", tokens: list[str] | None = None
) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return event(id=name, choices=[choice | ({"logprobs": {"tokens": tokens}} if tokens else {})])


def chat_event(text: str | None, finish: str | None = None) -> bytes:
    return event(id="a", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


END = event(id="a", choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3}) + DONE
LOST = event(error={"message": "the engine was lost", "code": 503})


@pytest.mark.parametrize(
    ("kind", "body", "is_complete"),
    [
        ("ok", text_event("one two") + text_event(" three", "length") + END, True),
        ("ok", chat_event(None) + chat_event("one two three") + chat_event("", "length") + END, True),
        ("wrong text", text_event("one too"), False),
        ("wrong text", text_event("one two", "length") + END, True),  # tokens are missing
        ("wrong text", text_event("one two three") + text_event(" three", "length") + END, True),
        ("wrong text", text_event("one two three", "stop") + END, True),
        ("wrong text", text_event("one two three", "length") + DONE, True),  # the usage is missing
        ("wrong text", text_event("one two") + text_event(" three", "length", name="b"), False),
        ("wrong text", text_event("one", tokens=["one"]), False),  # log-probabilities were not requested
        ("engine lost", text_event("one") + LOST + DONE, True),
        ("wrong text", text_event("two") + LOST + DONE, True),
        ("cut", text_event("one two"), True),
        ("", text_event("one two"), False),  # the connection decides
        ("", text_event("one two")[:-20], False),
    ],
)
def test_a_stream_must_equal_the_answer_up_to_its_end_or_an_error(
    kind: str, body: bytes, is_complete: bool
) -> None:
    sent = Sent(0.0, stream=True, by_proxy=False)
    check_answer(sent, 200, body, ANSWER, is_complete=is_complete)
    assert sent.kind == kind, sent.detail


@pytest.mark.parametrize(("kind", "tokens"), [("ok", ["one", " two"]), ("wrong text", ["one", " too"])])
def test_tokens_of_log_probabilities_are_compared(kind: str, tokens: list[str]) -> None:
    answer = Answer(text="one two", tokens=["one", " two"], finish="stop", usage=(5, 3))
    sent = Sent(0.0, stream=True, by_proxy=False)
    check_answer(sent, 200, text_event("one two", "stop", tokens=tokens) + END, answer)
    assert sent.kind == kind


UNSTREAMED = {
    "id": "a",
    "choices": [{"text": ANSWER.text, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3},
}


@pytest.mark.parametrize(
    ("kind", "status", "body"),
    [
        ("ok", 200, json.dumps(UNSTREAMED)),
        (
            "wrong text",
            200,
            json.dumps(UNSTREAMED | {"choices": [{"text": "one", "finish_reason": "length"}]}),
        ),
        ("wrong text", 200, json.dumps(UNSTREAMED) + "data: {}"),
        ("http 503", 503, "{}"),
    ],
)
def test_an_unstreamed_answer_must_equal_the_answer_or_be_an_error(kind: str, status: int, body: str) -> None:
    sent = Sent(0.0, stream=False, by_proxy=False)
    check_answer(sent, status, body.encode(), ANSWER)
    assert sent.kind == kind, sent.detail


def test_the_load_has_requests_of_every_kind() -> None:
    prompts = [WorkloadPrompt(f"{number}", "a", "some text") for number in range(16)]
    requests = bodies(prompts, "m", 16, seed=0)
    assert sum(path.endswith("chat/completions") for path, _ in requests) == 4
    assert sum("logprobs" in body for _, body in requests) == 2
    assert sum("stop" in body for _, body in requests) == 2
    shorter = bodies(prompts, "m", 16, seed=0, max_tokens=32)
    assert [max(body["max_tokens"] for _, body in each) for each in (requests, shorter)] == [128, 32]


class UnreachableRouter:
    """A client of an ingress that does not reach the router."""

    url = ""

    def status(self) -> dict[str, Any]:
        return {"ingress": {"all_warm": False, "router_unreachable": True}}

    def swap_table(self, table: bytes) -> None:
        raise ServiceError("the router does not answer")

    def set_policy(self, name: str) -> None:
        raise ServiceError("the router does not answer")


@pytest.fixture
def injector() -> FaultInjector:
    config = {
        "deployment_config": {"num_replicas": 2},
        "model_loading_config": {"model_id": "m", "model_source": "/nowhere"},
    }
    service: Any = UnreachableRouter()
    return FaultInjector(
        service, "", {"decode_config": config}, Run(Record()), random.Random(0), lambda what: None
    )


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "ingress", "proxy", "controller"])
async def test_a_role_without_a_process_does_not_end_the_run(
    role: str, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "find_role", lambda role: [])
    await injector._inject(f"kill {role}")
    assert injector._run.counters == {f"no process to kill {role}": 1}
    assert not injector._run.faults
    assert not injector._recovering


async def test_proxies_are_killed_in_turn(injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [SimpleNamespace(pid=pid) for pid in (1, 2)]
    killed: list[int] = []

    def kill(process: SimpleNamespace) -> set[int]:
        killed.append(process.pid)
        alive.remove(process)
        alive.append(SimpleNamespace(pid=process.pid + 2))  # its successor is the youngest
        return {77}

    monkeypatch.setattr(processes, "find_role", lambda role: list(alive))
    monkeypatch.setattr(processes, "kill", kill)
    for _ in range(4):
        await injector._inject("kill proxy")
    assert killed == [1, 2, 3, 4]
    assert [fault.client_ports for fault in injector._run.faults] == [{77}] * 4
    for task in injector._recovering:
        task.cancel()


@pytest.mark.parametrize(("listening", "is_complete"), [(2, True), (1, False)])
def test_a_service_is_complete_when_all_processes_listen(
    listening: int, is_complete: bool, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"ingress": {"all_warm": True, "router_unreachable": False}, "workers": ["a", "b"]}
    client = SimpleNamespace(status=lambda: status)
    monkeypatch.setattr(operations, "OperatorClient", lambda url, key, timeout_s: client)
    monkeypatch.setattr(httpx, "get", lambda url, timeout: httpx.Response(200))
    monkeypatch.setattr(application, "all_replicas_running", lambda: True)
    monkeypatch.setattr(processes, "listeners", lambda: Counter({8300: 2, 8301: listening}))
    injector._listeners = {8300: 2, 8301: 2}
    assert injector._is_complete() == is_complete


async def test_no_fault_is_injected_into_a_recovering_role(injector: FaultInjector) -> None:
    """A redeploy replaces all roles that can be killed, so a kill and a redeploy wait for each other."""
    happened: list[str] = []

    async def happen(fault: str) -> None:
        happened.append(fault)
        task = asyncio.create_task(asyncio.sleep(3600))
        injector._recovering[task] = operations.affected_roles(fault)

    injector._inject = happen
    injector._read_shape = lambda: (1, 1)
    faults = ["kill decode", "stop decode", "redeploy", "swap table", "kill ingress"]
    working = asyncio.create_task(injector.inject_faults(faults, 0.001, float("inf")))
    async with asyncio.timeout(30):
        while len(happened) < (2 if "redeploy" in happened else 3):
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    working.cancel()
    if "redeploy" in happened:
        assert sorted(happened) == ["redeploy", "swap table"]
    else:
        assert {fault.split()[-1] for fault in happened} == {"decode", "table", "ingress"}
    for task in injector._recovering:
        task.cancel()


@pytest.mark.parametrize("fault", ["swap table", "change policy", "redeploy"])
async def test_an_operation_that_fails_while_the_router_is_unreachable_is_counted(
    fault: str, injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deploy(arguments: dict[str, Any]) -> None:
        raise RayServeException("the controller is unreachable")

    monkeypatch.setattr(application, "deploy", deploy)
    await injector._try_operation(operations._OPERATIONS[fault])
    (counted,) = injector._run.counters.items()
    assert (counted[0].startswith("refused"), counted[1]) == (True, 1)


KILLED = [
    InjectedFault("kill ingress", 10.0, 4.0, {77}, died_s=10.2),
    InjectedFault("kill proxy", 20.0, 4.0, {88}, died_s=20.2),
]


@pytest.mark.parametrize(
    ("apart", "kind", "fields"),
    [
        ("own_connection", "connection lost", {"start_s": 9, "ended_s": 10.1, "port": 77}),
        ("own_connection", "cut", {"start_s": 9, "ended_s": 10.1, "port": 77}),
        (None, "connection lost", {"start_s": 9, "ended_s": 10.1, "port": 78}),  # another ingress's
        ("own_connection", "connection lost", {"start_s": 10.1, "connected_s": 10.1, "ended_s": 10.3}),
        ("own_connection", "connection lost", {"start_s": 9.9, "connected_s": 10.25, "ended_s": 10.3}),
        (None, "connection lost", {"start_s": 10.3, "connected_s": 10.3, "ended_s": 10.4}),
        (None, "engine lost", {"start_s": 9, "ended_s": 10.1, "port": 77}),
        (None, "wrong text", {"start_s": 9, "ended_s": 10.1, "port": 77}),
        (None, "connection lost", {"start_s": 12, "ended_s": 13, "port": 77}),  # a later connection
        (None, "not connected", {"start_s": 12, "ended_s": 13}),  # there is another ingress
        ("behind_proxy", "http 500", {"start_s": 9, "ended_s": 10.1, "by_proxy": True}),
        (None, "http 500", {"start_s": 9, "ended_s": 19, "by_proxy": True}),
        (None, "http 503", {"start_s": 9, "ended_s": 10.1, "by_proxy": True}),
        ("own_connection", "cut", {"start_s": 19, "ended_s": 20.1, "port": 88, "by_proxy": True}),
        ("nobody_listened", "not connected", {"start_s": 21, "ended_s": 21, "by_proxy": True}),
        (None, "not connected", {"start_s": 25, "ended_s": 25, "by_proxy": True}),  # the proxy is back
    ],
)
def test_a_kill_explains_only_failures_of_its_own_connections(
    apart: str | None, kind: str, fields: dict[str, Any]
) -> None:
    sent = Sent(**{"stream": True, "by_proxy": False, "kind": kind} | fields)
    faults = [injected for injected in KILLED if injected.at_s <= sent.ended_s]
    assert explained_by_fault(sent, faults) == apart


def test_one_of_two_proxies_always_listens() -> None:
    refused = Sent(21.0, stream=True, by_proxy=True, kind="not connected", ended_s=21.0)
    assert explained_by_fault(refused, KILLED, proxies=1) == "nobody_listened"
    assert explained_by_fault(refused, KILLED, proxies=2) is None
    run = Run(Record(), faults=KILLED, proxies=2)
    run.record_request(refused)
    assert rows(run.record)[-1]["failures"] == {"not connected": 1}


def test_listeners_are_counted_by_port_and_process() -> None:
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])), reuse_port=True); "
        "print('listening', flush=True); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as own:
        port = own.getsockname()[1]
        with socket.create_server(("127.0.0.1", port), reuse_port=True):  # the same process listens twice
            assert processes.listeners()[port] == 1
        command = [sys.executable, "-c", code, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "listening\n"
            assert processes.listeners()[port] == 2
            other.stdin.close()
        assert processes.listeners()[port] == 1
    assert processes.listeners()[port] == 0


def test_a_kill_returns_the_client_ports_of_the_killed_process() -> None:
    """One connection is accepted, the other one waits."""
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); c, _ = s.accept(); print('taken', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = int(server.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as accepted:
            assert server.stdout.readline() == "taken\n"
            with socket.create_connection(("127.0.0.1", port)) as waiting:
                ports = processes.kill(psutil.Process(server.pid))
                assert {accepted.getsockname()[1], waiting.getsockname()[1]} <= ports
                assert psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
        assert server.wait() == -signal.SIGKILL


def test_a_run_appends_to_the_record_of_earlier_runs(tmp_path: Path) -> None:
    file = tmp_path / "faults.jsonl"
    for number in range(2):
        record = Record(file)
        record.add("run", seed=number)
        run = Run(record)
        run.record_request(Sent(0.0, stream=True, by_proxy=False, kind="ok", ended_s=1.0))
        run.faults.append(InjectedFault("kill decode", 10.0, 4.0 + number))
        run.record_request(Sent(9.0, stream=True, by_proxy=False, kind="ok", ended_s=11.0, gap_s=2.0))
        run.record_request(Sent(9.0, stream=True, by_proxy=False, kind="left", ended_s=12.0))
        run.record_recovery(run.faults[-1])
        if number:
            stopped = InjectedFault("stop router", 20.0)
            run.faults.append(stopped)
            run.record_request(
                Sent(9.0, stream=True, by_proxy=False, kind="engine lost", ended_s=21.0, silence_s=16.0)
            )
            run.record_recovery(stopped)
        record.add(
            "end",
            settled_s=1.0 + number,
            left_behind=[],
            counters={"resumed": 3},
            processes=[{"process": "decode", "stalls": 1, "memory_mib": 10.0 * number}],
            unsteady=[],
        )
    row_by_fault = {row["fault"]: row for row in rows(Record(file))}
    assert list(row_by_fault) == ["before any", "kill decode", "stop router", "all"]
    assert [row["requests"] for row in row_by_fault.values()] == [2, 4, 1, 7]
    killed, stopped_row, total = row_by_fault["kill decode"], row_by_fault["stop router"], row_by_fault["all"]
    assert (killed["times"], killed["ok"], killed["left"]) == (2, 2, 2)
    assert (killed["recovery_p50_s"], killed["recovery_max_s"], killed["longest_gap_s"]) == (4.5, 5.0, 2.0)
    assert (stopped_row["failed"], stopped_row["not_recovered"], stopped_row["silent_over_15_s"]) == (1, 1, 1)
    assert (total["times"], total["failures"], total["resumed"]) == (3, {"engine lost": 1}, 6)
    assert (total["runs"], total["runs_to_the_end"], total["settled_max_s"]) == (2, 2, 2.0)
    assert total["proxies"] == 1  # earlier runs, without the option, had one proxy
    assert total["processes"] == [{"process": "decode", "stalls": 2, "memory_mib": 10.0}]
    assert find_problems(Record(file)) == [
        "failed: 1 {'engine lost': 1}",
        "silent_over_15_s: 1",
        "not_recovered: 1",
    ]


def test_dead_connections_are_those_of_a_killed_process_and_those_behind_a_proxy() -> None:
    record = Record()
    record.add("run", proxies=2)
    for kind in ("own_connection", "own_connection", "behind_proxy", "nobody_listened", "ok"):
        request = {"kind": kind, "silence_s": 0.0, "gap_s": 0.0, "stream": True}
        record.add("sent", fault="kill ingress", **request)
    record.add("fault", fault="kill ingress", recovery_s=1.0)
    _, killed, total = rows(record)
    assert (killed["own_connection"], killed["behind_proxy"], killed["dead_connections"]) == (2, 1, 3)
    assert (total["dead_connections"], total["failed"], total["proxies"]) == (3, 0, 2)


def test_runs_with_different_numbers_of_proxies_are_not_added_up(tmp_path: Path) -> None:
    Record(tmp_path / "faults.jsonl").add("run", seed=0)
    with pytest.raises(UserInputError, match="another number of proxies: give another file"):
        command.chaos(proxies=2, out=tmp_path / "faults.json")


class FakeCluster:
    """A cluster that records its nodes."""

    address = "127.0.0.1:6379"

    def __init__(self, initialize_head: bool, head_node_args: dict[str, Any]) -> None:
        assert initialize_head
        self.nodes, self.is_stopped = [head_node_args], False

    def add_node(self, **options: Any) -> None:
        self.nodes.append(options)

    def shutdown(self) -> None:
        self.is_stopped = True


def test_separate_nodes_have_an_ingress_each_and_stop_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters: list[FakeCluster] = []

    def make_cluster(**options: Any) -> FakeCluster:
        clusters.append(FakeCluster(**options))
        return clusters[-1]

    def fail() -> None:
        with separate_nodes(2) as start:
            assert start() == FakeCluster.address
            assert not clusters[0].is_stopped
            raise ZeroDivisionError

    monkeypatch.setenv("RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S", "30")  # it is restored after the test
    monkeypatch.setattr(ray.cluster_utils, "Cluster", make_cluster)
    monkeypatch.setattr(ray, "init", lambda **options: options["address"])
    with separate_nodes(2):
        pass
    assert not clusters  # none was started
    with pytest.raises(ZeroDivisionError):
        fail()
    (cluster,) = clusters
    assert cluster.is_stopped
    assert [node["num_cpus"] for node in cluster.nodes] == [application.CPUS, 0]
    assert [node["resources"] for node in cluster.nodes] == [INGRESS_ACTOR["resources"]] * 2


def test_metrics_are_those_of_all_live_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"MetricsExportPort": port, "Alive": port != 2} for port in (1, 2, 3)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(httpx, "get", lambda url, timeout: httpx.Response(200, text=f"from {url}"))
    assert chaos._metrics() == "from http://127.0.0.1:1/metrics\nfrom http://127.0.0.1:3/metrics"


def test_an_interrupted_run_keeps_its_record_and_is_reported() -> None:
    record = Record()
    record.add("run", seed=0)
    Run(record).record_request(Sent(0.0, stream=True, by_proxy=False, kind="ok", ended_s=1.0))
    assert rows(record)[-1]["requests"] == 1
    assert find_problems(record) == ["1 runs did not finish"]


@pytest.mark.parametrize(
    ("router", "own", "wrong_leases"), [(4, (1, 3), False), (5, (1, 3), True), (3, (1, 2), True)]
)
async def test_the_router_must_hold_exactly_the_leases_of_its_clients(
    router: int, own: tuple[int, int], wrong_leases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await asyncio.sleep(0.3)
        writer.write(b"0\r\n\r\n")
        writer.close()

    status = [{"leases": router, "ingress": {"leases": leases}} for leases in own]
    monkeypatch.setattr(chaos, "_read_statuses", lambda url: status)
    server = await asyncio.start_server(streams, "127.0.0.1", 0)
    async with server:
        problems = await chaos._compare_leases(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
    assert bool(problems) == wrong_leases
