"""Probes of engines on a described machine with vLLM, in a separate process that computes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eldr_serve.engine.active_backend import BACKEND

_TIMEOUT_S = 300


@dataclass(frozen=True)
class EngineProbe:
    """An engine to probe.

    Attributes:
        where: the location of the engine arguments in the file.
        config: the model's config.json.
        arguments: the engine's arguments, as EngineSpec.arguments returns them.
        memory_gib: memory of its GPU; on a CPU the size of the KV cache.
        capability: compute capability of its GPU; None on a CPU.
    """

    where: str
    config: str
    arguments: dict[str, Any]
    memory_gib: float
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class ProbeResult:
    """Sizes and kernels of an engine, as vLLM reports them; sizes are those of one rank.

    Attributes:
        refusal: why the engine would not start, one sentence; the other fields may then be zero.
        weights: size of the parameters, bytes.
        reserve: estimated size of everything else except the KV cache, bytes.
        kv: size of the KV cache, bytes.
        kv_tokens: number of tokens that the KV cache holds.
        sequences: number of sequences of max_model_len tokens that it holds at the same time.
        max_model_len: maximum length of a sequence, tokens.
        kernels: MoE kernels, and whether each reveals the experts that it chooses; empty if not probed.
        expert_shape: (MoE layers, experts of a layer).
        shared_arguments: resolved arguments that prefill and decode must share; JSON types.
    """

    refusal: str | None = None
    weights: int = 0
    reserve: int = 0
    kv: int = 0
    kv_tokens: int = 0
    sequences: float = 0.0
    max_model_len: int = 0
    kernels: tuple[tuple[str, bool], ...] = ()
    expert_shape: tuple[int, int] = (0, 0)
    shared_arguments: Mapping[str, Any] = field(default_factory=dict)


def probe_engines(engines: Sequence[EngineProbe]) -> list[ProbeResult]:
    """Return what vLLM reports about each engine.

    Raises:
        ChildProcessError: the probe process failed.
    """
    if not engines:
        return []
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **BACKEND.describe_environment,
    }
    probe = subprocess.run(
        [sys.executable, "-m", "eldr_serve.preflight.probe"],
        input=json.dumps([asdict(engine) for engine in engines]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if probe.returncode:
        raise ChildProcessError(
            f"the probe of vLLM failed: {(probe.stderr.strip() or 'without a message').splitlines()[-1]}"
        )
    return [
        ProbeResult(
            **fields
            | {
                "kernels": tuple((name, reveals) for name, reveals in fields.get("kernels", ())),
                "expert_shape": tuple(fields.get("expert_shape", (0, 0))),
            }
        )
        for fields in json.loads(probe.stdout.splitlines()[-1])
    ]
