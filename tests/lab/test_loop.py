"""A loop of parts: their order, rollbacks in the middle of a step, and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from octavo.lab.loop import Loop, Part, Reads, Step


class Counter:
    """Counts the steps made, and notes them among the calls of the parts."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.done = calls, 0

    def make_step(self) -> Step:
        self.done += 1
        self.calls.append("step")
        return Step(self.done, 1.0, torch.zeros(()), torch.zeros(()))


class Noted(Part[Step]):
    """Notes its calls; `at` is the call that rolls the run back."""

    def __init__(self, name: str, calls: list[str], *, every: int = 1, reads: Reads = "nothing", at: str = "") -> None:
        self.name, self.calls, self.every, self.reads, self.at = name, calls, every, reads, at
        self.seen: set[Reads] = set()
        self.state: dict[str, Any] = {name: 0}

    def before_step(self) -> bool:
        self.calls.append(f"before {self.name}")
        return self.at == "before"

    def is_due(self, step: Step) -> bool:
        return step.number % self.every == 0

    def after_step(self, step: Step) -> bool:
        self.calls.append(f"after {self.name}")
        self.seen = step.reads
        return self.at == "after"

    def roll_back(self, to: int) -> None:
        self.calls.append(f"{self.name} back to {to}")

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = {**state}


def test_parts_nest_and_those_that_are_not_due_are_passed_over() -> None:
    calls: list[str] = []
    parts = [
        Noted("save", calls, every=2, reads="weights"),
        Noted("log", calls, reads="results"),
        Noted("guard", calls),
    ]
    loop = Loop[Step](Counter(calls), parts)
    first = loop.step()
    before = ["before save", "before log", "before guard", "step"]
    assert calls == [*before, "after guard", "after log"]
    assert first is not None and first.number == 1 and parts[2].seen == {"nothing", "results"}
    calls.clear()
    loop.step()
    assert calls == [*before, "after guard", "after log", "after save"]
    assert parts[2].seen == {"nothing", "results", "weights"}


@pytest.mark.parametrize(
    ("at", "expected"),
    [("before", ["before log", "before guard"]), ("after", ["before log", "before guard", "step", "after guard"])],
)
def test_a_step_that_is_rolled_back_goes_no_further(at: str, expected: list[str]) -> None:
    calls: list[str] = []
    loop = Loop[Step](Counter(calls), [Noted("log", calls), Noted("guard", calls, at=at)])
    assert loop.step() is None
    assert calls == expected
    calls.clear()
    loop.roll_back(3)
    assert calls == ["log back to 3", "guard back to 3"]


def test_states_are_merged_and_those_with_a_key_are_apart() -> None:
    calls: list[str] = []
    log, guard = Noted("log", calls), Noted("guard", calls)
    guard.key = "guard"
    loop = Loop[Step](Counter(calls), [log, guard])
    assert loop.state_dict() == {"log": 0, "guard": {"guard": 0}}
    loop.load_state_dict({"log": 1, "guard": {"rule": 2}})
    assert (log.state["log"], guard.state) == (1, {"rule": 2})
    loop.load_state_dict({"log": 3})  # of before there were guardrails
    assert (log.state["log"], guard.state) == (3, {"rule": 2})
