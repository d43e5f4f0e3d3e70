"""The probe process: it reads engines as JSON from stdin and prints results as JSON in its last line."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.errors import ConfigurationError
from eldr_serve.preflight.machine import GIB
from eldr_serve.preflight.memory import kv_bytes, reserve_bytes
from eldr_serve.validation import first_problem


def probe(
    where: str,
    config: str,
    arguments: dict[str, Any],
    memory_gib: float,
    capability: tuple[int, int] | None,
) -> dict[str, Any]:
    """Return the fields of an eldr_serve.preflight.engines.ProbeResult for the fields of an EngineProbe."""
    fields: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        try:
            engine = BACKEND.describe(Path(folder), arguments, memory_gib, capability)
            fields["max_model_len"] = engine.max_model_len
            fields["shared_arguments"] = dict(engine.shared_arguments)
            fields["weights"] = engine.weight_bytes()
            fields["kernels"] = sorted(engine.kernels())
            fields["reserve"] = reserve_bytes(engine.largest_step(), "cpu" if capability is None else "gpu")
            if capability is None:
                fields["kv"] = int(memory_gib * GIB)
            else:
                utilization = engine.memory_utilization
                fields["kv"] = kv_bytes(memory_gib, utilization, fields["weights"], fields["reserve"])
            engine.check_counting()
            fields["expert_shape"] = engine.expert_shape()
            with suppress(ValueError):  # no room for one sequence: both stay 0
                fields["kv_tokens"], fields["sequences"] = engine.kv_cache(fields["kv"])
        except ValidationError as error:
            fields["refusal"] = first_problem(error, arguments, where=where)
        except (ValueError, NotImplementedError, AssertionError) as error:
            reason = " ".join(str(error).split())
            is_of_field = isinstance(error, ConfigurationError) and error.field in arguments
            fields["refusal"] = f"{where}.{reason}" if is_of_field else reason
    return fields


if __name__ == "__main__":
    print(json.dumps([probe(**engine) for engine in json.load(sys.stdin)]))
