"""NaN and infinities: in which parameter they lie, or in which layer and role they came first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from octavo import observed
from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Trial
from octavo.nn.fp8_weights import values

WHERE = {
    "input": "Look at what computes it, between this layer and those before: a norm, an attention, the data.",
    "weight": "The step before wrote it. Look at the optimizer and the gradient it was given; load a good checkpoint.",
    "grad_output": "Look at what comes after the layer, up to the loss: a division, a logarithm, a loss scale.",
}
"""What to do, by the role that was not finite first."""
OUTSIDE = "It arises outside of the FP8 layers, in the loss or what leads to it: octavo.disabled(model) has it too."


@check(
    "nan",
    symptom="the loss is NaN or infinite",
    remedy="Look at what made it where it came first, which is named; a good checkpoint is the way back.",
)
def nonfinite(trial: Trial) -> Finding:
    """Look at every parameter, then at every operand of one forward and backward, and at what comes out."""
    if told := _in_parameters(trial.model):
        rows = [{"parameter": name, "values": count} for name, count in told]
        seen = f"{told[0][0]} holds {told[0][1]} values that are not finite{_more(told)}"
        return failure(seen, remedy=WHERE["weight"], rows=rows)
    trial.model.zero_grad(set_to_none=True)
    with observed(trial.model) if trial.layers else nullcontext() as report:
        loss = trial.loss()
        loss.backward()
    gradients = [name for name, p in trial.model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    trial.model.zero_grad(set_to_none=True)
    faults = report.faults() if report is not None else []
    if faults:
        layer, role, count = faults[0]
        seen = f"{role} of {layer} was the first not to be finite: {count} values{_more(faults)}"
        return failure(seen, remedy=WHERE[role], rows=[fault._asdict() for fault in faults])
    value = float(loss.detach())
    if not math.isfinite(value):
        return failure(f"the loss is {value}, and every operand of the FP8 layers is finite", remedy=OUTSIDE)
    if gradients:
        return failure(f"the gradient of {gradients[0]} is not finite{_more(gradients)}", rows=_named(gradients))
    return ok(f"loss {value:.4f}; parameters, operands and gradients are finite", loss=value)


def _in_parameters(model: nn.Module) -> list[tuple[str, int]]:
    """Return parameters that are not finite, and how many of their values."""
    found = {name: values(p.detach(), p.dtype) for name, p in model.named_parameters()}
    return [(name, int((~x.isfinite()).sum())) for name, x in found.items() if not _is_finite(x)]


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _named(names: list[str]) -> list[dict[str, str]]:
    return [{"gradient": name} for name in names]


def _more(found: Sequence[object]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
