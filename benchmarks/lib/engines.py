"""Real CPU engines with the demo model: in eldr_serve's application, as Ray's, and as plain vLLM servers."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.lib.cluster import ROOT
from benchmarks.lib.prompts import MODEL
from eldr_serve.engine.vllm.config import engine_kwargs
from eldr_serve.errors import ServiceFailedError, UserInputError
from examples.demo_model import WEIGHTS

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned, spinning threads made requests 20 times slower
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits for a compiler
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# Folders for PYTHONPATH: a backend with which Triton interprets kernels, and names that transformers imports.
TRITON_CPU, TORCHVISION_CPU = (Path(__file__).with_name(name) for name in ("triton_cpu", "torchvision_cpu"))
_NIXL_PORTS_BESIDE = {"prefill_config": 24000, "decode_config": 26000}  # a second application's NIXL ports


def check_device(device: str) -> None:
    """Raise UserInputError if a GPU is requested and there is none."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise UserInputError(f"--device is {device}, but PyTorch sees no CUDA device here: use cpu")


def device_kwargs(device: str, batches: Sequence[int] = ()) -> dict[str, Any]:
    """Return `engine_kwargs` for a benchmark's engine on "cpu", "cuda" or "cuda-eager".

    On "cuda", steps of `batches` decoding requests run in CUDA graphs. Other batches are padded to the next
    larger size. Without `batches`, and on "cuda-eager", there are no graphs. Prompts are computed outside of
    graphs, and inductor compiles nothing, so that an engine starts in seconds.
    """
    if device == "cpu":
        return {"device": "cpu"}
    kwargs: dict[str, Any] = {"device": "gpu", "attention_backend": "TRITON_ATTN"}
    if device == "cuda-eager" or not batches:
        return kwargs | {"enforce_eager": True}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(batches)}
    return kwargs | {"compilation_config": graphs}


def weights_name() -> str:
    """Return a name of the demo model's weights, for files derived from them."""
    return hashlib.sha256((WEIGHTS / "SHA256SUMS").read_bytes()).hexdigest()[:8]


def engine_roles(arguments: dict[str, Any]) -> list[str]:
    """Return the keys of the engines' settings in a deployment's `args`. Whole replicas have only one."""
    return [role for role in ("prefill_config", "decode_config") if role in arguments]


def our_arguments(deployment: Path, model: Path, decode_replicas: int | None = None) -> dict[str, Any]:
    """Return the `args` of a deployment YAML, with the given model."""
    arguments: dict[str, Any] = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role in engine_roles(arguments):
        arguments[role] = copy.deepcopy(arguments[role])
        arguments[role]["model_loading_config"]["model_source"] = str(model.resolve())
    if decode_replicas is not None:
        arguments["decode_config"]["deployment_config"]["num_replicas"] = decode_replicas
    return arguments


def change_nixl_ports(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a deployment's `args` with other NIXL ports, for engines beside those of the same file."""
    changed = {}
    for role in engine_roles(arguments):
        own = arguments[role].get("experimental_configs") or {}
        ports = {"NIXL_SIDE_CHANNEL_PORT_BASE": _NIXL_PORTS_BESIDE[role]}
        changed[role] = arguments[role] | {"experimental_configs": own | ports}
    return arguments | changed


def ray_pd_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Ray Serve LLM's own prefill/decode application on equal engines."""
    ingress = {"autoscaling_config": None, "max_ongoing_requests": 8192}
    configs: dict[str, Any] = {"ingress_deployment_config": arguments["ingress_deployment_config"] | ingress}
    for role in ("prefill", "decode"):
        config = copy.deepcopy(arguments[f"{role}_config"])
        config["engine_kwargs"] = plain_engine_kwargs(role, config["engine_kwargs"])
        config["experimental_configs"] = {"stream_batching_interval_ms": 0}  # as in eldr_serve
        configs[f"{role}_config"] = config
    return configs


def plain_engine_kwargs(
    role: Any, arguments: dict[str, Any], *, our_connector: bool = False
) -> dict[str, Any]:
    """Return eldr_serve's engine arguments without its extension, or with its connector module only."""
    kwargs = engine_kwargs(role, device="cpu", **arguments)
    for name in ("scheduler_cls", "worker_extension_cls"):
        kwargs.pop(name)
    if role == "whole":
        kwargs.pop("kv_transfer_config")  # nothing is transferred
    elif not our_connector:
        kwargs["kv_transfer_config"] |= {"kv_connector": "NixlConnector"}
        kwargs["kv_transfer_config"].pop("kv_connector_module_path")
    return kwargs


@contextmanager
def start_process(command: list[str], *, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command. Stop it and all its children at the end.

    The command stays in the session, which Linux schedules as one group (`sched_autogroup_enabled`): in
    its own session it would get as much CPU time as eldr_serve's whole application, including its engines.
    """
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        yield started
    finally:
        # Not SIGINT: processes that a shell starts in the background ignore it, and so do their children.
        for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(started.pid, how)
                started.wait(15)


def wait_http(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 150.0) -> None:
    """Wait until `url` answers 200.

    Raises:
        ServiceFailedError: the process has ended, or the time is up. The message has the end of the log.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise ServiceFailedError(f"{url} did not answer: {tail}")


@contextmanager
def vllm_servers(
    arguments: dict[str, Any], *, port: int, logs: Path, our_connector: bool = False
) -> Iterator[dict[str, list[str]]]:
    """Start equal engines as plain vLLM OpenAI servers, one process group each.

    Yields {"prefill": urls, "decode": urls}. Whole replicas are under "decode", as in a deployment's file.
    """
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    with contextlib.ExitStack() as stack:
        started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        for role in urls:
            if f"{role}_config" not in arguments:
                continue
            config = arguments[f"{role}_config"]
            as_role = role if "prefill_config" in arguments else "whole"
            kwargs = plain_engine_kwargs(as_role, config["engine_kwargs"], our_connector=our_connector)
            for _ in range(config["deployment_config"]["num_replicas"]):
                number = len(started)
                command = _server_command(config, kwargs, port + number)
                env = (
                    ENGINE_ENV
                    | config["runtime_env"]["env_vars"]
                    | {
                        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, as in eldr_serve
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 100 + number),
                        "PYTHONPATH": str(ROOT),
                    }
                )
                log = logs / f"vllm_{role}_{number}.log"
                url = f"http://127.0.0.1:{port + number}"
                started.append((url, stack.enter_context(start_process(command, env=env, log=log)), log))
                urls[role].append(url)
        for url, server, log in started:
            wait_http(f"{url}/health", server, log)
        yield urls


@contextmanager
def vllm_router(
    venv: Path, policy: str, number: int, servers: Sequence[str], *, port: int, logs: Path
) -> Iterator[str]:
    """Run vllm-router number `number` over `servers` (options that name them), and yield its URL."""
    front, log = f"http://127.0.0.1:{port + 60 + number}", logs / f"vllm_router_{number}.log"
    command = [
        str(venv / "bin" / "vllm-router"),
        "--host=127.0.0.1",
        f"--port={port + 60 + number}",
        f"--policy={policy}",
        f"--prometheus-port={port + 80 + number}",
        *servers,
    ]
    with start_process(command, env={}, log=log) as router:
        wait_http(f"{front}/health", router, log, 60)
        yield front


def _server_command(config: dict[str, Any], kwargs: dict[str, Any], port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--model",
        config["model_loading_config"]["model_source"],
        f"--served-model-name={MODEL}",
        "--disable-uvicorn-access-log",
    ]
    for name, value in kwargs.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue  # vLLM's default
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return command
