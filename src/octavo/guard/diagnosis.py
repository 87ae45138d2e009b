"""From what was tried to a cause.

A step that raised an alarm was made again, from the snapshot before it, and its batch tried in both precisions with the
weights that it met:

    the alarm did not come back                   transient: hardware, or something outside of training
    it did, in FP8, and in BF16 all is well       precision
    in BF16 it is as bad, and on a batch that was
    trained on before worse than it was then      optimizer: the weights are bad
    in BF16 it is as bad, on this batch alone     data: the batch, or what the model makes of it
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Cause = Literal["transient", "precision", "data", "optimizer"]


class Probe(NamedTuple):
    """Loss and gradient norm of a batch that was tried, without an update."""

    loss: float
    gradient_norm: float

    def is_bad(self, loss_limit: float, gradient_limit: float) -> bool:
        """Return whether it would raise an alarm."""
        is_finite = math.isfinite(self.loss) and math.isfinite(self.gradient_norm)
        return not is_finite or self.loss > loss_limit or self.gradient_norm > gradient_limit


UNLEARNED = 1.02
"""Times the loss that a batch had when it was trained on: more, and the model knows less than before."""


class Evidence(NamedTuple):
    """What was tried before the step that raised an alarm is made again."""

    fp8: Probe
    """Its batch, by the recipe."""
    bf16: Probe
    """The same in high precision."""
    loss_limit: float
    gradient_limit: float
    earlier: Probe | None = None
    """A batch that was trained on shortly before, with the weights of now, in high precision; None where none was."""
    earlier_loss: float = math.inf
    """What its loss was then."""

    @property
    def is_unlearned(self) -> bool:
        """Whether the model does worse than it did, on what it was trained on."""
        return self.earlier is not None and self.earlier.is_bad(UNLEARNED * self.earlier_loss, math.inf)


def diagnose(evidence: Evidence) -> Cause | None:
    """Return the cause; None where FP8 shows nothing now, so that only making the step can tell."""
    limits = evidence.loss_limit, evidence.gradient_limit
    if not evidence.fp8.is_bad(*limits):
        return None
    if not evidence.bf16.is_bad(*limits):
        return "precision"
    return "optimizer" if evidence.is_unlearned else "data"
