"""Guardrails: what watches a run, finds the cause of what goes wrong, and sets it right.

    config      what is watched, and the limits
    watch       rules: from what a step measured to alarms
    diagnosis   from what was tried to a cause
    ladder      recipes that a layer climbs when FP8 harms it, and comes down again
    loop        a training loop of its own with guardrails
    guarded     what a run must be able to do, to be guarded
    guard       the state machine: snapshot, alarm, roll back, do again, diagnose, act
    locate      which layer, role and token was not finite first
    damage      which elements of a weight are not what a step could have made of them
    kept_scales the scales that a model keeps, when it is taken back or converted anew

`GuardConfig` needs no torch; what does loads on first use, so that the command line stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.guard.config import GuardConfig

if TYPE_CHECKING:
    from octavo.guard.guard import Guard
    from octavo.guard.guarded import Guarded, Note
    from octavo.guard.loop import Loop
    from octavo.guard.watch import Alarm, Observation

__all__ = ["Alarm", "Guard", "GuardConfig", "Guarded", "Loop", "Note", "Observation"]

_HOME = {
    "Guard": "octavo.guard.guard",
    "Guarded": "octavo.guard.guarded",
    "Loop": "octavo.guard.loop",
    "Note": "octavo.guard.guarded",
    "Alarm": "octavo.guard.watch",
    "Observation": "octavo.guard.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo.guard' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
