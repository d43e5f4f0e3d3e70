"""What the chaos command makes of answers and of times."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from eldr_serve.client import ServiceError
from loadgen import application
from loadgen.faults import chaos, processes
from loadgen.faults.chaos import Happened, Operator, Run, Sent, judge, rows

TEXT = "one two three"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def said(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}])


LOST = event(error={"message": "the engine was lost", "code": 503})


@pytest.mark.parametrize(
    ("kind", "body", "whole"),
    [
        ("ok", said("one two") + said(" three") + DONE, True),
        ("wrong text", said("one too"), False),
        ("wrong text", said("one two") + DONE, True),  # tokens are missing
        ("wrong text", said("one two three") + said(" three") + DONE, True),
        ("engine lost", said("one") + LOST + DONE, True),
        ("wrong text", said("two") + LOST + DONE, True),
        ("cut", said("one two"), True),
        ("", said("one two"), False),  # what else was known decides
        ("", said("one two")[:-20], False),
    ],
)
def test_a_stream_is_right_up_to_its_end_or_an_error(kind: str, body: bytes, whole: bool) -> None:
    sent = Sent(0.0, stream=True, by_proxy=False)
    judge(sent, 200, body, TEXT, whole=whole)
    assert sent.kind == kind


@pytest.mark.parametrize(
    ("kind", "status", "body"),
    [
        ("ok", 200, json.dumps({"choices": [{"text": TEXT}]})),
        ("wrong text", 200, json.dumps({"choices": [{"text": "one"}]})),
        ("wrong text", 200, json.dumps({"choices": [{"text": TEXT}]}) + "data: {}"),
        ("http 503", 503, "{}"),
    ],
)
def test_a_whole_answer_is_right_or_an_error(kind: str, status: int, body: str) -> None:
    sent = Sent(0.0, stream=False, by_proxy=False)
    judge(sent, status, body.encode(), TEXT)
    assert sent.kind == kind


class _Away:
    """An ingress that does not reach the router."""

    url = ""

    def status(self) -> dict[str, Any]:
        return {"ingress": {"ready": False, "router_away": True}}

    def swap_table(self, table: bytes) -> None:
        raise ServiceError("the router does not answer")

    def set_policy(self, name: str) -> None:
        raise ServiceError("the router does not answer")


ARGUMENTS = {
    "decode_config": {
        "deployment_config": {"num_replicas": 2},
        "model_loading_config": {"model_id": "m", "model_source": "/nowhere"},
    }
}


@pytest.mark.parametrize("role", ["prefill", "decode", "router", "ingress", "proxy", "controller"])
async def test_a_role_without_a_process_ends_no_run(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "of", lambda role: [])
    run = Run()
    operator = Operator(_Away(), "", ARGUMENTS, run, random.Random(0), lambda what: None)  # type: ignore[arg-type]
    await operator._happen(f"kill {role}")
    assert run.counters == {f"nobody to kill {role}": 1}
    assert not run.faults
    assert not operator._recovering


@pytest.mark.parametrize("fault", ["swap table", "change policy", "redeploy"])
async def test_an_operation_while_the_router_is_away_is_refused_and_ends_no_run(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deploy(arguments: dict[str, Any]) -> None:
        raise RayServeException("the controller is away")

    monkeypatch.setattr(application, "deploy", deploy)
    run = Run()
    operator = Operator(_Away(), "", dict(ARGUMENTS), run, random.Random(0), lambda what: None)  # type: ignore[arg-type]
    await operator._tolerantly(chaos._OPERATIONS[fault])
    assert sum(count for what, count in run.counters.items() if what.startswith("refused")) == 1


def test_requests_are_counted_with_the_fault_before_their_end() -> None:
    def ended(at_s: float, kind: str, **fields: Any) -> Sent:
        return Sent(0.0, stream=True, by_proxy=False, kind=kind, ended_s=at_s, **fields)

    run = Run(
        sent=[
            ended(1, "ok"),
            ended(11, "ok", gap_s=2.0),
            ended(12, "connection lost"),
            ended(21, "engine lost", silence_s=16.0),
            ended(31, "left"),
        ],
        faults=[
            Happened("kill decode", 10, 4.0),
            Happened("stop router", 20, None),
            Happened("kill decode", 30, 8.0),
        ],
    )
    found = {row["fault"]: row for row in rows(run)}
    assert list(found) == ["before any", "kill decode", "stop router", "all"]
    assert [row["requests"] for row in found.values()] == [1, 3, 1, 5]
    killed, stopped, total = found["kill decode"], found["stop router"], found["all"]
    assert (killed["times"], killed["ok"], killed["left"], killed["own_connection"]) == (2, 1, 1, 1)
    assert (killed["recovery_p50_s"], killed["recovery_max_s"], killed["longest_gap_s"]) == (6.0, 8.0, 2.0)
    assert (stopped["failed"], stopped["not_recovered"], stopped["silent_over_15_s"]) == (1, 1, 1)
    assert (total["times"], total["failures"]) == (3, {"engine lost": 1})
