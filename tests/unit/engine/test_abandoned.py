"""Abandoned prompts, in every order of events."""

from __future__ import annotations

import itertools

import pytest

from eldr_serve.engine.abandoned import REMEMBERED_S, AbandonedPrompts


@pytest.mark.parametrize("order", list(itertools.permutations(["hold", "abandon", "hold another"])))
def test_a_prompt_is_freed_once_it_is_held_and_abandoned(order: tuple[str, ...]) -> None:
    prompts = AbandonedPrompts()
    events = {
        "hold": lambda: prompts.hold({"engine-1": "mine"}),
        "abandon": lambda: prompts.abandon(["mine"]),
        "hold another": lambda: prompts.hold({"engine-2": "other"}),
    }
    done = set()
    for event in order:
        events[event]()
        done.add(event)
        assert prompts.ids_to_free() == (["engine-1"] if {"hold", "abandon"} <= done else [])
    assert prompts.ids_to_free() == ["engine-1"]  # it is listed until it is freed
    prompts.forget(["engine-1"])
    assert prompts.ids_to_free() == []
    prompts.forget(["engine-1", "never-held"])
    prompts.abandon(["other"])
    assert prompts.ids_to_free() == ["engine-2"]


def test_the_name_of_a_prompt_that_never_arrives_is_forgotten() -> None:
    clock = [0.0]
    prompts = AbandonedPrompts(clock=lambda: clock[0])
    prompts.abandon(["early"])
    clock[0] = 1.0
    prompts.abandon(["late"])
    clock[0] = REMEMBERED_S + 0.5
    prompts.abandon(["now"])
    prompts.hold({"1": "early", "2": "late", "3": "now"})
    assert prompts.ids_to_free() == ["2", "3"]
