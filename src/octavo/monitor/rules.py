"""The rules of guardrails over what a loop of one's own notes: scalars and tensors of a step, joined as they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.guard import Alarm, GuardConfig, Observation
from octavo.guard.alarms import AlarmRules

LOSS, GRADIENT_NORM, LEARNING_RATE = ("loss", "loss_fp8"), ("gradient_norm", "grad_norm"), ("lr", "learning_rate")
"""Names that a scalar may have, to be held against the rules; others are kept and not judged."""


class Rules:
    """Holds each step against the rules once all of it has arrived, in order.

    Args:
        config: the limits. Its mode must not be `act`: there is nothing here to act on.
        rows: what the rows of the tensors are about; empty where none are measured.
        say: is told each alarm.

    Raises:
        ConfigError: the mode is `act`.
    """

    def __init__(self, config: GuardConfig, rows: Sequence[tuple[Any, ...]], say: Callable[[Alarm], None]) -> None:
        if config.mode == "act":
            raise ConfigError(
                "octavo.Monitor: guardrails can only watch here; to let them act, step by octavo.guard.Loop, or train"
                " with `octavo train`."
            )
        self._config, self._say = config, say
        self._watch = AlarmRules(config, rows)
        self._scalars: dict[int, Mapping[str, float]] = {}
        self._tensors: dict[int, NDArray[np.float32]] = {}
        self._newest = 0 if rows else math.inf
        self._told: dict[str, int] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the scalars of a step."""
        self._scalars[step] = values
        self._judge(self._newest)

    def tensors(self, step: int, values: NDArray[np.float32]) -> None:
        """Take the tensors of a step: none of an earlier one comes any more."""
        self._newest = step
        self._tensors[step] = values
        self._judge(step)

    def close(self) -> None:
        """Judge what is left: nothing comes any more."""
        self._judge(math.inf)

    def _judge(self, complete: float) -> None:
        """Judge the steps up to one whose tensors have arrived."""
        for step in sorted(step for step in self._scalars if step <= complete):
            scalars, values = self._scalars.pop(step), self._tensors.pop(step, None)
            if self._config.mode == "watch":
                loss, norm, lr = (_first(scalars, names) for names in (LOSS, GRADIENT_NORM, LEARNING_RATE))
                self._hold(Observation(step, loss, norm, lr, values))
        if self._scalars:
            self._tensors = {step: values for step, values in self._tensors.items() if step >= min(self._scalars)}

    def _hold(self, seen: Observation) -> None:
        alarm = self._watch.check(seen)
        if alarm is not None:
            self._say(alarm)
        for over in self._watch.over_budget(seen):
            key = f"{over.layer} {over.role} {over.rule}"
            if over.step - self._told.get(key, -self._config.quiet) >= self._config.quiet:
                self._told[key] = over.step
                self._say(over)


def _first(values: Mapping[str, float], names: Sequence[str]) -> float:
    """Return the first of some scalars that was noted; 0, which breaks no rule, for none."""
    return next((values[name] for name in names if name in values), 0.0)
