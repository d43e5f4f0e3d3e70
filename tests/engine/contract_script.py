"""vLLM engines as replicas start them, and one for calibration: what they break of `engine_contract`.

Three processes, since vLLM starts once in one: an engine that prefills, one that generates (a whole one, so
that it has signatures too), which reads the other's blocks, and a tracer. There is no Ray: the port and the
host of NIXL's side channel are all that replicas have from it.
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

from engine_contract import (
    CHECKS,
    PROMPT,
    Subject,
    a_tracer_counts_prefill_and_decode_apart,
    request,
    run_check,
)
from tiny_model import EXPERTS, LAYERS, TOP_K

from eldr_serve.engine.backend import EngineRole
from eldr_serve.engine.chosen import ENGINES
from eldr_serve.engine.keys import SIGNATURE
from eldr_serve.engine.protocol import Engine

KWARGS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
SHAPE = (LAYERS, EXPERTS)


def nixl() -> int:
    """The side channel's port of this process, which is set."""
    from benchmarks.lib.replay_engine import free_port

    port = free_port()
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    return port


async def start(role: EngineRole, model: str) -> Engine:
    """As a replica starts it."""
    nixl()
    described = {
        "model_loading_config": {"model_id": "m", "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": dict(KWARGS),
        "log_engine_metrics": False,  # they would go to Ray
    }
    spec: Any = ENGINES.spec(role, described, kv_lease_s=300.0)
    os.environ |= spec.environment
    return await ENGINES.start(spec.config)


def end(engine: Any) -> None:
    """vLLM's process, too, which a replica's takes with it."""
    from eldr_serve.engine.vllm.compat.serve_llm import engine_client

    engine_client(engine.server.engine).shutdown()


async def serve(model: str, pipe: Connection) -> None:
    """A prefill engine that is called through a pipe: [its method, arguments], until it is None."""
    engine = await start("prefill", model)
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        method, arguments = call
        try:
            found = getattr(engine, method)(*arguments)
            answer = ("is", await found if asyncio.iscoroutine(found) else found)
        except Exception as error:
            answer = ("fails", (str(error), engine.status_of(error)))
        pipe.send(answer)
    end(engine)


class RaisedThereError(RuntimeError):
    """What the engine of another process raised: its words, and what its `status_of` says."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class There:
    """The engine of `serve`; one call at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __getattr__(self, method: str) -> Any:
        if method in ("kv_usage", "prefix_cache"):
            return lambda: self._call(method)
        return lambda *arguments: asyncio.to_thread(self._call, method, *arguments)

    @staticmethod
    def status_of(error: Exception) -> int:
        assert isinstance(error, RaisedThereError)
        return error.status

    @staticmethod
    def parameter_of(error: Exception) -> str | None:
        return None

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        kind, answer = self._pipe.recv()
        if kind == "fails":
            raise RaisedThereError(*answer)
        return answer


def trace(model: str, pipe: Connection) -> None:
    """What a tracer breaks, without routes and with them."""
    settings, environment = ENGINES.tracing(model, "cpu", dict(KWARGS))
    os.environ |= environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    port = nixl()
    tracer = ENGINES.tracer(settings, port)
    broken = []
    for routes in (False, True):
        try:
            a_tracer_counts_prefill_and_decode_apart(tracer, SHAPE, TOP_K, routes)
        except Exception:
            broken.append(traceback.format_exc())
    pipe.send(broken)


async def check(model: str, prefills: Connection) -> dict[str, Any]:
    """By check, what breaks it or ""; and the prompt's ids and counts, and the steps of a checked engine."""
    from transformers import AutoTokenizer

    there: Any = There(prefills)
    engine = await start("whole", model)
    ids = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    subject = Subject(there, engine, ids, SHAPE, TOP_K)
    broken = dict.fromkeys(CHECKS, "")
    for name, of in CHECKS.items():
        try:
            await run_check(of, subject)
        except Exception:
            broken[name] = traceback.format_exc()
    held = await there.prefill(request("counted"))
    await there.release("counted")
    engine.take_steps()
    await engine.generate(request("counted", tokens=9), lambda *_: None)
    found = {"broken": broken, "ids": held.token_ids.tolist(), "counts": held.kv[SIGNATURE]}
    found["steps"] = engine.take_steps().steps
    end(engine)
    return found


def main(model: str, out: Path) -> None:
    fork = get_context("fork")
    (mine, theirs), (traced, tracers) = fork.Pipe(), fork.Pipe()
    children = [
        fork.Process(target=lambda: asyncio.run(serve(model, theirs))),
        fork.Process(target=trace, args=(model, tracers)),
    ]
    for child in children:
        child.start()
    for end_of_child in (theirs, tracers):
        end_of_child.close()  # a child that dies is heard of
    found = asyncio.run(check(model, mine))
    found["tracer"] = traced.recv()
    mine.send(None)
    for child in children:
        child.join()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
