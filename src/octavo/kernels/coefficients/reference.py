"""Reference coefficients in plain PyTorch. See `octavo.kernels.coefficients`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.coefficients import StepCoefficients, StepInputs
from octavo.kernels.optimizer import COEFFICIENTS


def group_squares(squares: Tensor, own: Tensor, groups: int) -> Tensor:
    """Return the sum of squares per group. See `octavo.kernels.coefficients.group_squares`."""
    is_member = torch.arange(groups, device=squares.device)[:, None] == own[:, 0]
    return torch.where(is_member, squares, 0.0).sum(dim=1)


def coefficients(inputs: StepInputs, counts: Sequence[Tensor], skipped: Tensor, *_unused: object) -> StepCoefficients:
    """Return the coefficients of a step, and count it. See `octavo.kernels.coefficients.coefficients`."""
    hyper, own = inputs.hyper, inputs.own
    by_group, skip, norm = _clip(inputs)
    skipped += skip
    if counts:
        torch._foreach_add_(list(counts), 1.0 - skip[0].float())
    steps = torch.stack(list(counts)).int() if counts else skip.new_empty(0)
    group, bound, lr_ratio, averages = own.unbind(dim=1)
    factor = by_group[group.long()]
    lr, beta1, beta2, eps, decay, *_ = hyper[group.long()].unbind(dim=1)
    first, second = power(torch.stack((beta1, beta2)), steps.clamp(min=1))  # a skipped first step has count 0
    columns = {
        "factor": torch.where(averages > 0, factor * (1 - beta1), factor),
        "first_share": 1 - beta1,
        "second_decay": beta2,
        "second_share": 1 - beta2,
        "first_correction": 1 / (1 - first),
        "root_correction": 1 / (1 - second).sqrt(),
        "eps": eps,
        "lr": lr * lr_ratio,
        "weight_kept": 1 - lr * decay if inputs.decays_weights else torch.ones_like(lr),
        "weight_decay": decay,
        "largest_update": bound,
        "first_decay": beta1,
    }
    return StepCoefficients(torch.stack([columns[name] for name in COEFFICIENTS], dim=1).float(), steps, skip, norm)


def power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return base to a non-negative integer power, by repeated squaring."""
    result = torch.ones_like(base)
    for _ in range(int(exponent.max()).bit_length() if exponent.numel() else 0):
        result = torch.where(exponent % 2 > 0, result * base, result)
        base, exponent = base * base, exponent // 2
    return result


def _clip(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient factor per group, FP64 (G,); whether to skip the step, int32 (1,); and the norm or None."""
    *_, sign, clip, clip_all = inputs.hyper.unbind(dim=1)
    scale = torch.ones_like(sign[:1]) if inputs.grad_scale is None else inputs.grad_scale.double().reshape(1)
    inverse = 1 / scale.to(sign.device)
    skip = torch.zeros(1, dtype=torch.bool, device=sign.device)
    if inputs.found_inf is not None:
        skip = skip | (inputs.found_inf.reshape(1) > 0).to(sign.device)
    if inputs.group_squares is None:
        return sign * inverse, skip.int(), None
    squares = inputs.group_squares * (inverse * inverse)
    norms, norm = squares.sqrt(), squares.sum().sqrt()
    factor = (clip / (norms + 1e-6)).clamp(max=1.0)
    clipped = factor * norms
    factor = factor * (clip_all / ((clipped * clipped).sum().sqrt() + 1e-6)).clamp(max=1.0)
    return sign * inverse * factor, (skip | ~norm.isfinite()).int(), norm.float()
