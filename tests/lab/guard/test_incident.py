"""What a retry that differs from the first run says about a fault, and when an alarm is the same again."""

from __future__ import annotations

import math

import pytest
from loops import ROWS, telemetry

from octavo.lab.guard.alarms import Alarm, Observation
from octavo.lab.guard.incident import Incident

AT = 7
SUSPECT = Alarm(AT, "update", "a", "weight", 9.0, 1.0)


def alarm(rule: str, layer: str = "", role: str = "") -> Alarm:
    return Alarm(AT, rule, layer, role, 2.0, 1.0)


@pytest.mark.parametrize(
    ("incident", "place"),
    [
        (Incident(alarm("loss spike"), 0, {}), ("", "")),
        (Incident(alarm("loss spike"), 0, {}, difference=("b", "grad_output")), ("b", "grad_output")),
        (Incident(alarm("loss spike"), 0, {}, difference=("b", "input"), suspect=SUSPECT), ("a", "weight")),
        (Incident(alarm("loss spike"), 0, {}, difference=("b", "weight"), suspect=SUSPECT), ("b", "weight")),
        (Incident(alarm("weight jump", "b", "weight"), 0, {}, difference=("a", "input")), ("b", "weight")),
        (Incident(alarm("layer shift", "b", "input"), 0, {}, suspect=SUSPECT), ("b", "input")),
        (Incident(alarm("nonfinite", "b", "weight"), 0, {}, suspect=SUSPECT), ("a", "weight")),
    ],
)
def test_a_transient_fault_has_a_place(incident: Incident, place: tuple[str, str]) -> None:
    assert incident.place() == place


def test_the_first_step_that_differs_counts() -> None:
    first = {step: Observation(step, 2.0, 1.0, 1e-3, telemetry(b_input_amax=1.0 + step), ROWS) for step in (5, 6, 7)}
    incident = Incident(alarm("nonfinite"), 4, first)
    incident.compare(first[5])
    assert incident.difference is None
    incident.compare(Observation(6, 2.0, 1.0, 1e-3, telemetry(b_input_amax=70.0), ROWS))
    incident.compare(Observation(7, 2.0, 1.0, 1e-3, telemetry(a_input_amax=math.inf), ROWS))
    assert incident.difference == ("b", "input")


@pytest.mark.parametrize(("step", "cleared", "is_back"), [(AT, True, True), (AT, False, False), (AT + 1, True, False)])
def test_an_alarm_comes_back_at_its_step_once_the_batch_is_cleared(step: int, cleared: bool, is_back: bool) -> None:
    incident = Incident(alarm("loss spike"), 0, {}, is_batch_cleared=cleared)
    assert incident.has_come_back(alarm("gradient spike")._replace(step=step)) == is_back
