"""The name of a capture's files, by which a later benchmark finds it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lib import captured_routes
from eldr_serve.errors import ServiceFailedError
from loadgen.workload import WorkloadPrompt, write_prompts


def test_a_capture_has_a_name_of_all_that_its_texts_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        traces.append(command[command.index("--trace") + 1])
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(captured_routes, "subprocess", SimpleNamespace(run=run))
    write_prompts(tmp_path / "prompts.jsonl", [WorkloadPrompt("1", "en", "Hello.")])

    def start(**options: Any) -> None:
        with pytest.raises(ServiceFailedError, match=r"the capture of .* ended with status 1"):
            captured_routes.load_or_capture(tmp_path, tmp_path, **{"requests": 8} | options)

    def versions(**changes: str) -> dict[str, Any]:
        return {"versions": {"vllm": "0.32.0", "ray": "2.60.0"} | changes}

    monkeypatch.setattr(captured_routes, "environment", versions)
    start()
    monkeypatch.setattr(captured_routes, "environment", lambda: versions(ray="2.61.0"))
    start()
    assert traces[0] == traces[1]
    for options in ({"requests": 10}, {"output_tokens": 8}, {"seed": 1}, {"device": "cuda"}):
        start(**options)
    for name, value in (("BLOCK", 16), ("TEMPERATURE", 0.0), ("_MAX_PROMPT_TOKENS", 512)):
        with monkeypatch.context() as patch:
            patch.setattr(captured_routes, name, value)
            start()
    monkeypatch.setattr(captured_routes, "environment", lambda: versions(vllm="0.33.0"))
    start()
    assert len(set(traces)) == len(traces) - 1
