"""Guardrails: detect faults of a training run, diagnose their cause, and repair them.

    config      limits and mode
    alarms      measurements of a step, alarms about them, events
    rules       the rules: from measurements to alarms; `history` of past steps, `telemetry_rows` of a step
    parameters  invariants of parameters and optimizer moments
    guard       the state machine: snapshot, alarm, rollback, retry, diagnosis, action
    incident    an alarm under investigation
    diagnosis   from probes and the retry to a cause
    refinement  layers that FP8 harms, on the `ladder` of recipes
    locate      the first non-finite tensor; weight elements that no update can explain
    guarded     what guardrails need of a training loop: its base class
    loop        a training loop with guardrails

`GuardConfig` needs no torch; the other names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.lazy import lazy
from octavo.lab.guard.config import GuardConfig

if TYPE_CHECKING:
    from octavo.lab.guard.alarms import Alarm, GuardEvent, Observation
    from octavo.lab.guard.guard import Guard
    from octavo.lab.guard.guarded import Guarded
    from octavo.lab.guard.loop import Loop, Update

__all__ = ["Alarm", "Guard", "GuardConfig", "GuardEvent", "Guarded", "Loop", "Observation", "Update"]

__getattr__ = lazy(
    __name__, {"alarms": "Alarm GuardEvent Observation", "guard": "Guard", "guarded": "Guarded", "loop": "Loop Update"}
)
