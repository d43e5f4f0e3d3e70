"""Run the checks of `engine_contract` on vLLM engines that start like replicas, and on one for calibration.

vLLM starts once per process, so there are three processes. The first has an engine that prefills. The second
has a whole replica, which also counts prompts, and reads the first engine's blocks. The third has an engine
for calibration. There is no Ray: replicas use it only for the port and the host of NIXL's side channel.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.lib.ports import free_port
from benchmarks.lib.tiny_model import EXPERTS, LAYERS, TOP_K
from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from eldr_serve.engine.protocol import Engine, EngineRole
from tests.support.engine_contract import (
    CHECKS,
    PROMPT,
    Subject,
    a_calibration_engine_counts_prefill_and_decode_separately,
    request,
    run_check,
)

KWARGS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
SHAPE = (LAYERS, EXPERTS)


def nixl() -> int:
    """Return the port of this process's side channel after setting it."""
    port = free_port()
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    return port


async def start(role: EngineRole, model: str, **arguments: Any) -> Engine:
    """Start an engine like a replica."""
    nixl()
    described = {
        "model_loading_config": {"model_id": "m", "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": KWARGS | arguments,
        "log_engine_metrics": False,  # Ray would receive them
    }
    spec: Any = BACKEND.spec(role, described, kv_lease_s=300.0)
    os.environ |= spec.environment
    return await BACKEND.start(spec.config)


def end(engine: Any) -> None:
    """End the engine and vLLM's process, by force after 1 s; it otherwise ends with the replica's process."""
    from eldr_serve.engine.vllm.compat.serve_llm import engine_client

    engine_client(engine.server.engine).shutdown(timeout=1.0)


async def serve(model: str, pipe: Connection, **arguments: Any) -> None:
    """Serve a prefill engine over a pipe: [method, arguments] messages, until one is None."""
    engine = await start("prefill", model, **arguments)
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        method, arguments = call
        try:
            result = getattr(engine, method)(*arguments)
            answer = ("is", await result if asyncio.iscoroutine(result) else result)
        except Exception as error:
            answer = ("fails", (str(error), engine.status_of(error)))
        pipe.send(answer)
    end(engine)


class RemoteEngineError(RuntimeError):
    """An error of the engine in another process: its message and the result of its `status_of`."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class RemoteEngine:
    """The engine of `serve`, which supports one call at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __getattr__(self, method: str) -> Any:
        if method in ("kv_usage", "prefix_cache"):
            return lambda: self._call(method)
        return lambda *arguments: asyncio.to_thread(self._call, method, *arguments)

    @staticmethod
    def status_of(error: Exception) -> int:
        assert isinstance(error, RemoteEngineError)
        return error.status

    @staticmethod
    def parameter_of(error: Exception) -> str | None:
        return None

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        kind, answer = self._pipe.recv()
        if kind == "fails":
            raise RemoteEngineError(*answer)
        return answer


def calibrate(model: str, pipe: Connection) -> None:
    """Return what the calibration engine violates, without routes and with them."""
    settings, environment = BACKEND.calibration_settings(model, "cpu", dict(KWARGS))
    os.environ |= environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    port = nixl()
    engine = BACKEND.start_calibration(settings, port)
    broken = []
    for routes in (False, True):
        try:
            a_calibration_engine_counts_prefill_and_decode_separately(engine, SHAPE, TOP_K, routes)
        except Exception:
            broken.append(traceback.format_exc())
    pipe.send(broken)


async def check(model: str, prefills: Connection) -> dict[str, Any]:
    """Return the result by check ("" if it passed), the prompt's ids and counts, and steps of an engine."""
    from transformers import AutoTokenizer

    remote: Any = RemoteEngine(prefills)
    engine = await start("whole", model)
    ids = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    subject = Subject(remote, engine, ids, SHAPE, TOP_K)
    broken = dict.fromkeys(CHECKS, "")
    for name, of in CHECKS.items():
        try:
            await run_check(of, subject)
        except Exception:
            broken[name] = traceback.format_exc()
    prefilled = await remote.prefill(request("counted"))
    await remote.release("counted")
    engine.take_steps()
    await engine.generate(request("counted", tokens=9), lambda *_: None)
    counts = prefilled.kv_transfer_params[EXPERT_COUNTS_KEY]
    report = {"broken": broken, "ids": prefilled.token_ids.tolist(), "counts": counts}
    report["steps"] = engine.take_steps().steps
    end(engine)
    return report


def main(model: str, out: Path) -> None:
    fork = get_context("fork")
    (parent_end, child_end), (calibration, calibrating) = fork.Pipe(), fork.Pipe()
    children = [
        fork.Process(target=lambda: asyncio.run(serve(model, child_end))),
        fork.Process(target=calibrate, args=(model, calibrating)),
    ]
    for child in children:
        child.start()
    for end_of_child in (child_end, calibrating):
        end_of_child.close()  # then recv raises if the child dies
    report = asyncio.run(check(model, parent_end))
    report["calibration"] = calibration.recv()
    parent_end.send(None)
    for child in children:
        child.join()
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
