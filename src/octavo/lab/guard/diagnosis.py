"""Diagnosis: from probes and a retry to a cause.

After an alarm the run is rolled back to the snapshot before it, and the step's batch is computed in both precisions
with the weights of that step:

    the alarm does not come back                  transient: hardware, or something outside of training
    it comes back in FP8, and BF16 is fine        precision
    a parameter is not finite, or the first tensor
    that is not is a weight                       model: its weights are bad, or a layer computes something else
    BF16 is as bad, and a batch that was trained
    on before is worse than it was then           optimizer: learning rate, moments, gradients
    BF16 is as bad, on this batch only            data: the batch, or how the model reacts to it
    BF16 is as bad, and so are most batches after a new level (`new_level_of`)

An alarm of a slow rule, or about parameters, comes back although the batch itself is fine. Its rule and layer then
decide (`lasting_cause`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from octavo.lab.guard.alarms import Alarm, percent_above
from octavo.lab.guard.rules import RULES

Cause = Literal["transient", "precision", "data", "optimizer", "model"]


class Probe(NamedTuple):
    """Loss and gradient norm of a batch, computed without an update."""

    loss: float
    gradient_norm: float

    def is_bad(self, loss_limit: float, gradient_limit: float) -> bool:
        """Return True if it would raise an alarm."""
        is_finite = math.isfinite(self.loss) and math.isfinite(self.gradient_norm)
        return not is_finite or self.loss > loss_limit or self.gradient_norm > gradient_limit


IsWell = Callable[[Probe], bool]
"""Returns True if a batch raises no alarm, or is near enough to BF16."""
FP8_GAP = 1.0
"""Percent of the loss by which FP8 may exceed BF16 on a batch before it is blamed for a lasting alarm."""
FP8_GRADIENTS = 1.5
"""Factor between the gradient norms in FP8 and BF16 above which FP8 is blamed."""
UNLEARNED = 1.02
"""Factor on the loss that a batch had in training; above it the model has got worse."""
GROWN = 4.0
"""Factor on the gradient norm that a batch had in training; above it gradients are wrong."""


class Evidence(NamedTuple):
    """Probes made before the step that raised an alarm is repeated."""

    fp8: Probe
    """Its batch in FP8."""
    bf16: Probe
    """Its batch in high precision."""
    loss_limit: float
    gradient_limit: float
    earlier: Probe | None = None
    """A batch from shortly before, with the current weights in high precision; None if there was none."""
    in_training: Probe = Probe(math.inf, math.inf)
    """Loss and gradient norm that it had in training."""

    @property
    def is_unlearned(self) -> bool:
        """True if the model got worse on data that it was trained on."""
        return self.earlier is not None and self.earlier.is_bad(UNLEARNED * self.in_training.loss, math.inf)


def diagnose(evidence: Evidence) -> Cause | None:
    """Return the cause; None if FP8 is fine now, so that only repeating the step can tell."""
    limits = evidence.loss_limit, evidence.gradient_limit
    if not evidence.fp8.is_bad(*limits):
        return None
    if not evidence.bf16.is_bad(*limits) and disagreement(evidence.fp8, evidence.bf16) > 1:
        return "precision"  # two precisions on both sides of a limit are no evidence
    return "optimizer" if evidence.is_unlearned else "data"


def disagreement(fp8: Probe, bf16: Probe) -> float:
    """Return the distance of FP8 from BF16 on a batch, in multiples of the limits: above 1, FP8 is to blame."""
    if not (math.isfinite(fp8.loss) and math.isfinite(fp8.gradient_norm)):
        return math.inf
    gap = loss_gap(fp8, bf16) / FP8_GAP
    low, high = sorted((fp8.gradient_norm, bf16.gradient_norm))
    return max(gap, high / low / FP8_GRADIENTS if low > 0 else 0.0)


def loss_gap(fp8: Probe, bf16: Probe) -> float:
    """Return the loss in FP8 above that in BF16, in percent; 0 if that is 0."""
    return percent_above(fp8.loss, bf16.loss) or 0.0


def wellness(rule: str, fp8: Probe, bf16: Probe) -> IsWell:
    """Return the test that a batch must pass after a remedy: at most half as far from BF16 as before, or within limits.

    Args:
        rule: rule of the alarm. For `gap` the distance is that of the loss alone, without a limit.
        fp8: the batch before the remedy.
        bf16: the same in high precision.
    """
    distance, least = (loss_gap, 0.0) if rule == "gap" else (disagreement, 1.0)
    before = distance(fp8, bf16)
    most = max(before / 2, least) if math.isfinite(before) else least
    return lambda probe: distance(probe, bf16) <= most


def new_level_of(evidence: Evidence) -> Cause:
    """Return the cause if most batches are bad: the optimizer if gradients of an earlier batch grew too, else data."""
    earlier, limit = evidence.earlier, GROWN * evidence.in_training.gradient_norm
    return "optimizer" if earlier is not None and earlier.is_bad(math.inf, limit) else "data"


def lasting_cause(alarm: Alarm, first_layer: str, evidence: Evidence) -> Cause:
    """Return the cause of an alarm that comes back when the steps before it are repeated, without a bad batch.

    Args:
        alarm: the alarm.
        first_layer: the layer that reads the embedded tokens first, so that only data and embedding precede it.
        evidence: probes of the batch, and of an earlier one.
    """
    if RULES[alarm.rule].kind == "update":
        return "optimizer"
    if alarm.rule == "gap" or disagreement(evidence.fp8, evidence.bf16) > 1:
        return "precision"
    if alarm.role == "input" and alarm.layer != first_layer:
        return "model"
    return "optimizer" if evidence.is_unlearned or alarm.role == "grad_weight" else "data"
