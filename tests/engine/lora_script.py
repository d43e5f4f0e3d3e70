"""Answer a prompt by a prefill and a decode engine with two random adapters, and by plain vLLM.

Plain vLLM has no adapter, but a model whose weights contain it. It starts once per process, so each engine
has its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.lib.tiny_model import LAYERS
from eldr_serve.engine.calls import EXPERT_COUNTS_KEY
from tests.engine.contract_script import KWARGS, RemoteEngine, end, serve, start
from tests.support.engine_contract import PROMPT, Sent, request

TOKENS, RANK = 12, 4
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}  # [out, in]


def make_adapter(model: Path, folder: Path, seed: int) -> None:
    """Write an adapter in PEFT's format, and beside it in `merged` the model with the adapter's weights."""
    shutil.copytree(model, folder / "merged")
    file = str(folder / "merged" / "model.safetensors")
    generator, merged, adapter = torch.Generator().manual_seed(seed), load_file(file), {}
    for layer in range(LAYERS):
        for name, (rows, columns) in SHAPES.items():
            module = f"model.layers.{layer}.self_attn.{name}"
            first = torch.randn(RANK, columns, generator=generator) / 4
            second = torch.randn(rows, RANK, generator=generator) / 4
            adapter[f"base_model.model.{module}.lora_A.weight"] = first
            adapter[f"base_model.model.{module}.lora_B.weight"] = second
            merged[f"{module}.weight"] += 2 * second @ first
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*SHAPES]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(adapter, str(folder / "adapter_model.safetensors"))
    save_file(merged, file, metadata={"format": "pt"})


def answer_alone(model: Path, pipe: Connection) -> None:
    """Return the tokens that plain vLLM generates."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(model), enforce_eager=True, **KWARGS)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    (output,) = engine.generate([PROMPT], sampling, use_tqdm=False)
    pipe.send(list(output.outputs[0].token_ids))


async def answer_by_two(model: str, prefills: Connection, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens and the prompt's expert counts by name of the base model and the adapters."""
    remote: Any = RemoteEngine(prefills)
    engine = await start("decode", model, **arguments)
    report = {}
    for name in ("m", "first", "second", "first"):  # an engine keeps one adapter, so it loads the first again
        prefilled = await remote.prefill(request(name, model=name))
        counts = prefilled.kv_transfer_params.pop(EXPERT_COUNTS_KEY)
        sent = Sent()
        await engine.generate(request(name, tokens=TOKENS, prefilled=prefilled, model=name), sent)
        report[name] = {"ids": np.frombuffer(sent.ids, np.uint32).tolist(), "counts": counts}
    end(engine)
    return report


def main(model: Path, folder: Path) -> None:
    fork, modules = get_context("fork"), []
    for seed, name in enumerate(("first", "second")):
        make_adapter(model, folder / name, seed)
        modules.append({"name": name, "path": str(folder / name)})
    (parent_end, child_end), alone = fork.Pipe(), fork.Pipe()
    process = fork.Process(target=answer_alone, args=(folder / "first" / "merged", alone[1]))
    process.start()
    process.join()
    assert process.exitcode == 0
    arguments = {"lora_modules": modules, "lora_target_modules": [*SHAPES]}
    prefill = fork.Process(target=lambda: asyncio.run(serve(str(model), child_end, **arguments)))
    prefill.start()
    child_end.close()  # then recv raises if the child dies
    report = asyncio.run(answer_by_two(str(model), parent_end, arguments))
    parent_end.send(None)
    prefill.join()
    report["first"]["alone"] = alone[0].recv()
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
