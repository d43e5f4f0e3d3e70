"""The probe process: it reads engines as JSON from stdin and prints answers as JSON in its last line."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eldr_serve.engine.chosen import ENGINES
from eldr_serve.preflight.machine import GIB
from eldr_serve.preflight.memory import kv_bytes, reserve_bytes
from eldr_serve.validation import problem


def answer(
    where: str,
    config: str,
    arguments: dict[str, Any],
    memory_gib: float,
    capability: tuple[int, int] | None,
) -> dict[str, Any]:
    """Return the fields of an eldr_serve.preflight.engines.Answer for the fields of an Engine."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        try:
            engine = ENGINES.describe(Path(folder), arguments, memory_gib, capability)
            found["max_model_len"], found["agreed"] = engine.max_model_len, dict(engine.agreed)
            found["weights"] = engine.weight_bytes()
            found["kernels"] = sorted(engine.kernels())
            found["reserve"] = reserve_bytes(engine.step(), "cpu" if capability is None else "gpu")
            if capability is None:
                found["kv"] = int(memory_gib * GIB)
            else:
                utilization = engine.memory_utilization
                found["kv"] = kv_bytes(memory_gib, utilization, found["weights"], found["reserve"])
            engine.check()
            with suppress(ValueError):  # no room for one sequence: both stay 0
                found["kv_tokens"], found["sequences"] = engine.kv_cache(found["kv"])
        except ValidationError as error:
            found["refusal"] = problem(error, arguments, where=where)
        except (ValueError, NotImplementedError, AssertionError) as error:
            reason = " ".join(str(error).split())
            found["refusal"] = f"{where}.{reason}" if reason.partition(" is ")[0] in arguments else reason
    return found


if __name__ == "__main__":
    print(json.dumps([answer(**engine) for engine in json.load(sys.stdin)]))
