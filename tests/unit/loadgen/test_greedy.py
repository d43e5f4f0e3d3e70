"""Comparison of greedy answers between policies, on a fake service."""

from __future__ import annotations

import threading

import pytest

from eldr_serve.commands.client import OperatorClient
from eldr_serve.errors import ServiceFailedError
from loadgen import greedy
from loadgen.greedy import differing_answers, greedy_sentence
from loadgen.workload import WorkloadPrompt
from tests.support.fake_service import KEY, FakeService

PROMPTS = [WorkloadPrompt(name, "d", f"Say {name}") for name in ("one", "two")]
POLICIES = ["shortest-queue", "random", "locality-band:band=0.1"]


def find_differences(service: FakeService) -> dict[str, list[str]]:
    return differing_answers(OperatorClient(service.url, KEY), "m", POLICIES, PROMPTS, max_tokens=5)


def test_every_policy_gets_the_same_greedy_requests(service: FakeService) -> None:
    differences = find_differences(service)
    assert differences == {policy: [] for policy in POLICIES}
    assert service.policies_set == ["shortest-queue", "random", "locality-band"]
    requests = [(b["messages"][0]["content"], b["temperature"], b["max_tokens"]) for b in service.bodies]
    assert requests == [("Say one", 0, 5), ("Say two", 0, 5)] * 3
    sentence = greedy_sentence(differences, 2)
    assert sentence == "Greedy answers to 2 prompts, sent one at a time, are equal under all 3 policies."


def test_an_answer_that_a_policy_changes_is_reported(service: FakeService) -> None:
    service.says = lambda policy, prompt: policy if (policy, prompt) == ("random", "Say two") else prompt
    texts = find_differences(service)
    assert texts == {"shortest-queue": [], "random": ["two"], "locality-band:band=0.1": []}
    assert greedy_sentence(texts, 2) == "GREEDY ANSWERS DIFFER from those under shortest-queue (random: two)."


def test_a_refused_prompt_is_reported_in_one_sentence(service: FakeService) -> None:
    service.fail_every = 2
    with pytest.raises(ServiceFailedError, match="prompt 'two' was not answered: HTTP 503"):
        find_differences(service)


def test_a_late_answer_is_reported_in_one_sentence(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "ANSWER_TIMEOUT_S", 0.05)
    release = threading.Event()
    service.says = lambda policy, prompt: str(release.wait(10))
    with pytest.raises(ServiceFailedError, match=r"prompt 'one' was not answered within 0\.05 s"):
        find_differences(service)
    release.set()
