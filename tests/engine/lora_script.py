"""Answer a prompt by a prefill and a decode engine with two adapters, and by engines with merged weights.

vLLM starts once per process, so each engine has its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from tests.engine.contract_script import KWARGS, RemoteEngine, end, serve, start
from tests.support import adapter
from tests.support.engine_contract import PROMPT, Sent, request

TOKENS = 12


def answer_alone(model: str, pipe: Connection) -> None:
    """Return the tokens that plain vLLM generates with a model."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, enforce_eager=True, **KWARGS)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([PROMPT], sampling, use_tqdm=False)
    pipe.send(list(output.outputs[0].token_ids))


async def answer_by_two(model: str, prefills: Connection, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens and the prompt's expert counts by name of the base model and the adapters."""
    remote: Any = RemoteEngine(prefills)
    engine = await start("decode", model, **arguments)
    report = {}
    for name in ("m", "first", "second", "first"):  # one of the adapters is loaded again
        prefilled = await remote.prefill(request(name, model=name))
        counts = prefilled.kv_transfer_params.pop(EXPERT_COUNTS_KEY)
        sent = Sent()
        await engine.generate(request(name, tokens=TOKENS, prefilled=prefilled, model=name), sent)
        report[name] = {"ids": np.frombuffer(sent.ids, np.uint32).tolist(), "counts": counts}
    end(engine)
    return report


def main(model: Path, folder: Path) -> None:
    fork = get_context("fork")
    modules, merged = [], {"m": model}
    for seed, name in enumerate(("first", "second")):
        weights = adapter.random_weights(seed)
        modules.append({"name": name, "path": str(adapter.make(folder / name, weights))})
        merged[name] = adapter.merge(model, weights, folder / f"{name}-merged")
    answers = {}
    for name, path in merged.items():
        parent_end, child_end = fork.Pipe()
        process = fork.Process(target=answer_alone, args=(str(path), child_end))
        process.start()
        child_end.close()  # so that recv raises if the child dies
        answers[name] = parent_end.recv()
        process.join()
    arguments = {"lora_modules": modules, "lora_target_modules": [*adapter.SHAPES]}
    parent_end, child_end = fork.Pipe()
    prefill = fork.Process(target=lambda: asyncio.run(serve(str(model), child_end, **arguments)))
    prefill.start()
    child_end.close()
    report = asyncio.run(answer_by_two(str(model), parent_end, arguments))
    parent_end.send(None)
    prefill.join()
    for name, answer in report.items():
        answer["alone"] = answers[name]
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
