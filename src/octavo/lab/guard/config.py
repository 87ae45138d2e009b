"""Limits and mode of guardrails. No torch here: the command line reads this file for `--help`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Limits and mode of guardrails."""

    mode: Literal["off", "watch", "act"] = "watch"
    """`watch` only reports; `act` also rolls back, skips batches, limits the learning rate and refines layers."""
    snapshot_every: int = 50
    """Steps between snapshots in memory that `act` rolls back to; the newest two are kept."""
    loss_jump: float = 8.0
    """Loss spike: this many (robust) standard deviations above the median of the last 8 steps, and 5 %."""
    gradient_jump: float = 30.0
    """Gradient spike: this many times the median norm of the last 32 steps."""
    weight_jump: float = 4.0
    """Largest factor by which the largest element of a weight may grow per step."""
    saturated: float = 1e-3
    """Share of a tensor's elements that may exceed the largest code."""
    flushed: float = 0.05
    """Share of an input's or weight's elements that may round to zero."""
    flushed_gradient: float = 0.25
    """Share of an output gradient's elements that may round to zero; higher, as many affect no weight."""
    patience: int = 3
    """Consecutive steps above a share's limit before it is acted on."""
    parameters_every: int = 5
    """Steps between checks of weights and moments: finite, changed as an optimizer changes them, equal on all ranks."""
    update_jump: float = 8.0
    """Largest factor by which the change of a parameter per step may exceed that of earlier steps."""
    drift: float = 5.5
    """Slow rise of the loss: mean of 8 or 16 steps above that of the 46 before, in standard errors, and 0.3 %."""
    gap_drift: float = 9.0
    """The same for the loss above the BF16 baseline's, mean of 4 steps; steps of a gap depend on each other."""
    layer_shift: float = 9.0
    """Shift of the variance of a layer's tensors: mean log of 3 of 4 steps to the 46 before, in standard errors."""
    quiet: int = 500
    """Steps without alarm after which a layer returns to its previous recipe; doubled each time it fails again."""
    shadow_every: int = 0
    """Steps between comparisons of a batch's loss in FP8 and BF16, for runs without a baseline; 0: never."""
    shadow_gap: float = 1.0
    """Percent by which the loss in FP8 may exceed that in BF16, on a batch and the mean of the next four."""
    rollbacks: int = 8
    """Rollbacks around the same steps after which an alarm is only reported; a NaN or infinity then ends the run."""

    def __post_init__(self) -> None:
        if self.mode not in ("off", "watch", "act"):
            raise ConfigError(f"guard.mode: '{self.mode}' is none of 'off', 'watch', 'act'.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "mode" or (field.name == "shadow_every" and value == 0):
                continue
            if not 0 < value < float("inf"):
                raise ConfigError(f"guard.{field.name}: {value} is not a positive number.")
        for name in ("saturated", "flushed", "flushed_gradient"):
            if getattr(self, name) > 1:
                raise ConfigError(f"guard.{name}: {getattr(self, name)} is a share of the elements: at most 1.")
