"""Scalars and tensors of a step come at different times, and are judged together."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.guard import Alarm, GuardConfig
from octavo.kernels.sample import STATS
from octavo.monitor.rules import Rules

ROWS = [("a", "input"), ("a", "weight")]


def tensors(**of_weight: float) -> np.ndarray:
    values = np.zeros((2, len(STATS)), dtype=np.float32)
    values[:, STATS.index("amax")] = 1.0
    for name, value in of_weight.items():
        values[1, STATS.index(name)] = value
    return values


def rules(said: list[Alarm], rows: list[tuple[str, str]] = ROWS, **config: float) -> Rules:
    return Rules(GuardConfig(**config), rows, said.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors_first", [True, False])
def test_a_step_is_judged_when_all_of_it_is_there(tensors_first: bool) -> None:
    said: list[Alarm] = []
    made = rules(said)
    for step, amax in ((1, 1.0), (2, 9.0)):
        calls = [lambda s=step, a=amax: made.tensors(s, tensors(amax=a)), lambda s=step: made.scalars(s, {"loss": 2.0})]
        for call in calls if tensors_first else calls[::-1]:
            assert said == []
            call()
    assert [(alarm.step, alarm.rule, alarm.layer) for alarm in said] == [(2, "weight jump", "a")]


def test_steps_that_telemetry_passes_over_are_judged_by_their_scalars() -> None:
    said: list[Alarm] = []
    made = rules(said)
    for step in range(1, 16):
        made.scalars(step, {"loss_fp8": float("nan") if step == 14 else 2.0})
        if step % 5 == 0:
            made.tensors(step, tensors())
    assert [alarm.step for alarm in said] == [14]


def test_without_telemetry_nothing_is_waited_for() -> None:
    said: list[Alarm] = []
    made = rules(said, rows=[])
    made.scalars(1, {"loss": float("inf")})
    assert len(said) == 1


def test_what_is_left_is_judged_at_the_end() -> None:
    said: list[Alarm] = []
    made = rules(said)
    made.scalars(1, {"grad_norm": float("nan")})
    assert said == []
    made.close()
    assert len(said) == 1


def test_a_budget_is_told_once_in_a_quiet_time() -> None:
    said: list[Alarm] = []
    made = rules(said, patience=2, quiet=10)
    for step in range(1, 16):
        made.scalars(step, {"loss": 2.0})
        made.tensors(step, tensors(saturated=0.5))
    assert [(alarm.step, alarm.rule) for alarm in said] == [(2, "saturated"), (12, "saturated")]


def test_off_is_off_and_act_is_refused() -> None:
    said: list[Alarm] = []
    Rules(GuardConfig(mode="off"), [], said.append).scalars(1, {"loss": float("nan")})
    assert said == []
    with pytest.raises(ConfigError, match="to let them act, step by"):
        Rules(GuardConfig(mode="act"), [], said.append)
