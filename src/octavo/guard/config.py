"""What guardrails watch, and their limits. No torch here: the command line reads this file to answer `--help`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What guardrails watch, and what they may do."""

    mode: Literal["off", "watch", "act"] = "watch"
    """`watch` notes what is wrong; `act` also rolls back, skips batches, holds the learning rate, refines layers."""
    snapshot_every: int = 50
    """Steps between two snapshots in memory that `act` rolls back to; the newest two are kept."""
    loss_jump: float = 8.0
    """Spike of the loss: this many standard deviations (robust) above the median of the last 8 steps, and 5 %."""
    gradient_jump: float = 30.0
    """Spike of the gradient: this many times the median norm of the last 32 steps."""
    weight_jump: float = 4.0
    """Times that the largest element of a weight may grow in a step; no update of a sane learning rate does."""
    saturated: float = 1e-3
    """Share of a tensor's elements that may lie past the largest code."""
    flushed: float = 0.05
    """Share of the elements of an input or a weight that may become zero."""
    flushed_gradient: float = 0.25
    """The same of the gradient of an output, which holds many elements of no weight."""
    patience: int = 3
    """Steps on end past a share's limit before anything is done about it."""
    quiet: int = 500
    """Steps without an alarm after which a layer comes back to the recipe before; twice as many each time it fails."""
    shadow_every: int = 0
    """Steps between two forwards in BF16 beside one in FP8, of the same batch and weights; 0: never. For runs without
    a twin."""
    shadow_gap: float = 1.0
    """Percent by which the loss in FP8 may lie above that of the shadow, twice on end."""
    rollbacks: int = 8
    """Rolls back in `quiet` steps after which a run is given up."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "mode" or (field.name == "shadow_every" and value == 0):
                continue
            if not 0 < value < float("inf"):
                raise ConfigError(f"guard.{field.name}: {value} is not a positive number.")
        for name in ("saturated", "flushed", "flushed_gradient"):
            if getattr(self, name) > 1:
                raise ConfigError(f"guard.{name}: {getattr(self, name)} is a share of the elements: at most 1.")
