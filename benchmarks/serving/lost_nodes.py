"""Let a cluster of several Ray nodes lose and regain nodes and its GCS under load.

    python -m benchmarks.serving.lost_nodes --redis-server redis-server

Ray's nodes are real, but on one machine (`ray.cluster_utils`). The head has two ingresses and the router. Two
other nodes each have a prefill and a decode engine that compute nothing. Each node has a Serve proxy, and all
proxies share one port. GCS stores its state in Redis with `--redis-server`, otherwise in files.

The cluster loses one engine node for 10 s, by kill -9 of all its processes, then GCS for 8 s, then both
engine nodes at once for 10 s. Requests at the ingresses' own port may fail only in the last case, when no
engine is left. A lost node's proxy loses its connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import psutil
import typer

from benchmarks.lib import options
from benchmarks.lib.client import Answer, allow_open_files, count_failures, open_session, request_completion
from benchmarks.lib.cluster import RAY_ENV, python_path, wait_ready
from benchmarks.lib.fakes.names import APPLICATION
from benchmarks.lib.fakes.service import check_text, request_body
from eldr_serve.commands.run import run
from loadgen.results import column_notes, publish

BENCHMARKS = {"lost_nodes": "all"}
_NODES = 2  # engine nodes
_AWAY_S, _GCS_S = 10.0, 8.0
_RECOVERY_S = 90.0
_TOKENS, _GAP_MS = 40, 90.0  # a stream takes 3.6 s
NOTES = column_notes(
    "Ray nodes on one machine, with engines that compute nothing.",
    {
        "requests": "Requests to the ingresses' own ports that ended before the next loss.",
        "by_proxy": "Requests through Serve's proxies that ended before the next loss.",
        "recovery_s": "Time from the loss until all replicas run and all pairs of engines are warm. It "
        "includes `away_s`, the time before the nodes return.",
        "longest_gap_s": "Longest time between two tokens of a stream.",
    },
)


@contextmanager
def _store(redis_server: str) -> Iterator[dict[str, str]]:
    """Yield Ray's environment variables for the storage of GCS."""
    with tempfile.TemporaryDirectory() as folder:
        if not redis_server:
            yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": folder}
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [redis_server, "--port", f"{port}", "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
            finally:
                server.terminate()


class _Nodes:
    """The cluster of Ray nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 4, "resources": {"ingress": 4.0}, "include_dashboard": False}
        # A thread starts new nodes under load, and Ray cannot set its exit hooks in a thread.
        self.cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.engines = [self._engine_node() for _ in range(_NODES)]

    def _engine_node(self) -> Any:
        return self.cluster.add_node(num_cpus=4, resources={"engine": 2.0})

    def lose(self, number: int) -> None:
        """Kill nodes like a machine failure: no process shuts down cleanly."""
        for node in self.engines[:number]:
            (raylet,) = node.all_processes["raylet"]
            children = psutil.Process(raylet.process.pid).children(recursive=True)
            for process in children:
                process.kill()
            self.cluster.remove_node(node, allow_graceful=False)
        del self.engines[:number]

    def bring_back(self) -> None:
        """Start new nodes in place of the lost ones."""
        while len(self.engines) < _NODES:
            self.engines.append(self._engine_node())


def _is_complete(url: str) -> bool:
    """Return whether all replicas run and all pairs of engines are warm."""
    import httpx
    from ray import serve
    from ray.exceptions import RayError

    try:
        deployments = serve.status().applications[APPLICATION].deployments.values()
        status = httpx.get(f"{url}/eldr/status", timeout=5).json()
    except (RayError, httpx.TransportError, ValueError, KeyError):
        return False
    running = [deployment.replica_states.get("RUNNING", 0) for deployment in deployments]
    all_run = running == [2] * len(running) and status.get("decode_replicas") == _NODES
    return all_run and bool(status["ingress"]["all_warm"]) and not status["ingress"]["router_unreachable"]


async def _drive(
    nodes: _Nodes, urls: tuple[str, str], in_flight: int
) -> tuple[list[tuple[bool, Answer]], list[dict[str, Any]]]:
    """Return the answers, each with whether a proxy served it, and each loss with its times."""
    answers: list[tuple[bool, Answer]] = []
    over = asyncio.Event()
    body = request_body(_TOKENS, _GAP_MS)

    async def client(number: int) -> None:
        by_proxy = number % 4 == 0
        async with open_session(60.0) as http:
            while not over.is_set():
                answer = await request_completion(http, urls[by_proxy], body)
                check_text(answer, _TOKENS)
                answers.append((by_proxy, answer))
                if answer.error is not None:
                    await asyncio.sleep(0.5)

    clients = [asyncio.create_task(client(number)) for number in range(in_flight)]
    lost: list[dict[str, Any]] = []
    head = nodes.cluster.head_node
    for what, lose, away_s, back in (
        ("one node of engines", lambda: nodes.lose(1), _AWAY_S, nodes.bring_back),
        ("GCS", head.kill_gcs_server, _GCS_S, head.start_gcs_server),
        ("all nodes of engines", lambda: nodes.lose(_NODES), _AWAY_S, nodes.bring_back),
    ):
        await asyncio.sleep(6.0)
        lost_at_s = time.perf_counter()
        typer.echo(f"lost: {what}", err=True)
        await asyncio.to_thread(lose)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(back)
        recovery_s = None
        while time.perf_counter() - lost_at_s < _RECOVERY_S + away_s:
            if await asyncio.to_thread(_is_complete, urls[0]):
                recovery_s = time.perf_counter() - lost_at_s
                break
            await asyncio.sleep(0.5)
        typer.echo(f"recovered after {recovery_s} s", err=True)
        lost.append({"lost": what, "at": lost_at_s, "away_s": away_s, "recovery_s": recovery_s})
    await asyncio.sleep(6.0)
    over.set()
    await asyncio.gather(*clients)
    return answers, lost


def _rows(answers: list[tuple[bool, Answer]], lost: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each loss."""
    rows = []
    for entry, until in zip(lost, [*(e["at"] for e in lost[1:]), float("inf")], strict=True):
        ended_answers = [pair for pair in answers if entry["at"] <= pair[1].ended_at_s < until]
        direct, proxied = (
            [answer for proxy, answer in ended_answers if proxy == by_proxy] for by_proxy in (False, True)
        )
        failed = [answer for answer in direct if answer.error is not None]
        row = {name: value for name, value in entry.items() if name != "at"}
        row |= {"requests": len(direct), "failures": len(failed), "errors": count_failures(direct)}
        row |= {"by_proxy": len(proxied), "errors_by_proxy": count_failures(proxied)}
        row["failures_by_proxy"] = sum(answer.error is not None for answer in proxied)
        row["failing_s"] = max((a.ended_at_s for a in failed), default=entry["at"]) - entry["at"]
        row["longest_gap_s"] = max((max(a.timing.chunk_gaps_s, default=0.0) for a in direct), default=0.0)
        rows.append(row | {"ttft_max_s": max((a.timing.ttft_s or 0.0 for a in direct), default=0.0)})
    return rows


def lost_nodes(
    redis_server: Annotated[str, typer.Option(help="Redis program for GCS's state; default: files.")] = "",
    in_flight: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 40,
    port: Annotated[int, typer.Option(help="HTTP port of the proxies; the ingresses use the next.")] = 8340,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Lose nodes under load. Exit with status 1 if a request failed that another node could have answered."""
    allow_open_files(65536)
    os.environ |= RAY_ENV | {"PYTHONPATH": python_path()}
    with _store(redis_server) as store:
        os.environ |= store
        import ray
        from ray import serve

        from benchmarks.lib.fakes.application import fake_application

        nodes = _Nodes()
        try:
            ray.init(
                address=nodes.cluster.address, namespace="serve", log_to_driver=False, logging_level="error"
            )
            serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
            engines = {
                "ray_actor_options": {"num_cpus": 0.1, "resources": {"engine": 0.5}},
                "max_replicas_per_node": 1,
                "health_check_period_s": 1,
            }
            head = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"ingress": 1.0}}}
            application = fake_application(
                decode_replicas=_NODES,
                prefill_replicas=_NODES,
                prefill_s=0.02,
                seed=seed,
                own_port=port + 1,
                ingresses=2,
                engine_options=engines,
                ingress_options=head,
            )
            serve.run(application, name=APPLICATION, route_prefix="/")
            urls = (f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port}")
            wait_ready(urls[0])
            rows = _rows(*asyncio.run(_drive(nodes, urls, in_flight)))
        finally:
            serve.shutdown()
            ray.shutdown()
            nodes.cluster.shutdown()
    inputs = {"in_flight": in_flight, "gcs_keeps_its_state_in": "Redis" if redis_server else "files"}
    publish("lost_nodes", rows, inputs=inputs, seed=seed, out=out, notes=NOTES)
    if any(row["failures"] for row in rows[:-1]) or any(row["recovery_s"] is None for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(lost_nodes)
