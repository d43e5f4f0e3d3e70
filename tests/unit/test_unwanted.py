"""Prompts that are given up, in every order of events."""

from __future__ import annotations

import itertools

import pytest

from eldr_serve.engine.unwanted import REMEMBERED_S, Unwanted


@pytest.mark.parametrize("order", list(itertools.permutations(["hold", "give up", "hold another"])))
def test_a_prompt_is_due_once_it_is_held_and_given_up(order: tuple[str, ...]) -> None:
    prompts = Unwanted()
    events = {
        "hold": lambda: prompts.hold({"engine-1": "mine"}),
        "give up": lambda: prompts.give_up(["mine"]),
        "hold another": lambda: prompts.hold({"engine-2": "other"}),
    }
    done = set()
    for event in order:
        events[event]()
        done.add(event)
        assert prompts.due() == (["engine-1"] if {"hold", "give up"} <= done else [])
    assert prompts.due() == ["engine-1"]  # again and again, until it is freed
    prompts.freed(["engine-1"])
    assert prompts.due() == []
    prompts.freed(["engine-1", "never-held"])
    prompts.give_up(["other"])
    assert prompts.due() == ["engine-2"]


def test_a_name_that_never_came_is_forgotten() -> None:
    clock = [0.0]
    prompts = Unwanted(now=lambda: clock[0])
    prompts.give_up(["early"])
    clock[0] = 1.0
    prompts.give_up(["late"])
    clock[0] = REMEMBERED_S + 0.5
    prompts.give_up(["now"])
    prompts.hold({"1": "early", "2": "late", "3": "now"})
    assert prompts.due() == ["2", "3"]
