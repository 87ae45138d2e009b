"""Coefficients in one launch: each program takes a block of parameters, and recomputes the norms of all groups."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import coefficients as contract
from octavo.kernels.coefficients import StepCoefficients, StepInputs
from octavo.kernels.optimizer import COEFFICIENTS
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import cdiv, next_power_of_2

BLOCK = 128
"""Parameters per program."""
SUMMED = 1024
"""Smallest block of a sum over parameters."""

HYPER: tl.constexpr = tl.constexpr(len(contract.HYPER))
OWN: tl.constexpr = tl.constexpr(len(contract.ParamSettings._fields))
COLUMNS: tl.constexpr = tl.constexpr(len(COEFFICIENTS))
"""Columns of the two input tables, and of the coefficients."""


def group_squares(squares: Tensor, own: Tensor, groups: int) -> Tensor:
    """See `octavo.kernels.coefficients.group_squares`."""
    sums = torch.empty(groups, dtype=torch.float64, device=squares.device)
    size = max(next_power_of_2(len(squares)), SUMMED)
    _coefficient_sums_kernel[(groups,)](squares, own, sums, len(squares), SIZE=size, num_warps=min(size // 256, 32))
    return sums


def coefficients(
    inputs: StepInputs, counts: Sequence[Tensor], skipped: Tensor, uploads: PinnedStaging, name: Hashable
) -> StepCoefficients:
    """See `octavo.kernels.coefficients.coefficients`."""
    device, own = inputs.hyper.device, inputs.own
    addresses = tuple(count.data_ptr() for count in counts)
    places = uploads(("counts", name), addresses, lambda: torch.tensor(addresses, dtype=torch.int64), device)
    made = StepCoefficients(
        torch.empty(len(own), COLUMNS.value, dtype=torch.float32, device=device),
        torch.empty(len(own), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        None if inputs.group_squares is None else torch.empty((), dtype=torch.float32, device=device),
    )
    amp = (None if one is None else one.to(device) for one in (inputs.grad_scale, inputs.found_inf))
    _coefficients_kernel[(max(cdiv(len(own), BLOCK), 1),)](
        inputs.hyper, own, inputs.group_squares, *amp, places, skipped, *made, len(inputs.hyper), len(own),
        DECAYS=inputs.decays_weights, GROUPS=next_power_of_2(len(inputs.hyper)), SIZE=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return made


@Kernel
@triton.jit(do_not_specialize=["count"])
def _coefficient_sums_kernel(squares, own, sums, count, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)
    group = tl.load(own + OWN * row, mask=row < count, other=-1.0).to(tl.int32)
    is_member = group == tl.program_id(0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(squares + row, mask=is_member, other=0.0), axis=0))


@Kernel
@triton.jit(do_not_specialize=["groups", "count"])
def _coefficients_kernel(
    hyper, own, squares, grad_scale, found_inf, counts, skipped, coefficients, steps, skip, norm, groups, count,
    DECAYS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, 1)
    inverse, clip_all, skips = tl.full((1,), 1.0, tl.float64), tl.full((1,), 1.0, tl.float64), one * 0
    if grad_scale is not None:
        inverse = 1 / tl.load(grad_scale + one).to(tl.float64)
    if found_inf is not None:
        skips = (tl.load(found_inf + one) > 0).to(tl.int32)
    if squares is not None:
        group = tl.arange(0, GROUPS)
        true = tl.load(squares + group, mask=group < groups, other=0.0) * (inverse * inverse)
        found = tl.sqrt(tl.sum(true, axis=0, keep_dims=True))
        kept = _clip_factor(tl.load(hyper + HYPER * group + 6, mask=group < groups, other=1.0), tl.sqrt(true))
        clipped = kept * tl.sqrt(true)
        clip_all = _clip_factor(tl.load(hyper + 7 + one), tl.sqrt(tl.sum(clipped * clipped, axis=0, keep_dims=True)))
        skips = tl.where(found < float("inf"), skips, 1)
    if tl.program_id(0) == 0:
        tl.store(skip + one, skips)
        tl.store(skipped + one, tl.load(skipped + one) + skips)
        if squares is not None:
            tl.store(norm + one, found.to(tl.float32))

    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = row < count
    counted = tl.load(counts + row, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(counted, mask=mask, other=0.0) + (1 - skips).to(tl.float32)
    tl.store(counted, step, mask=mask)
    step = step.to(tl.int32)
    tl.store(steps + row, step, mask=mask)

    group = tl.load(own + OWN * row, mask=mask, other=0.0).to(tl.int32)
    bound = tl.load(own + OWN * row + 1, mask=mask, other=0.0)
    lr_ratio = tl.load(own + OWN * row + 2, mask=mask, other=0.0)
    averages = tl.load(own + OWN * row + 3, mask=mask, other=0.0)
    of_group = hyper + HYPER * group
    lr, beta1, beta2 = tl.load(of_group), tl.load(of_group + 1), tl.load(of_group + 2)
    eps, decay = tl.load(of_group + 3), tl.load(of_group + 4)
    factor = tl.load(of_group + 5) * inverse
    if squares is not None:
        true = tl.load(squares + group) * (inverse * inverse)
        factor = factor * (_clip_factor(tl.load(of_group + 6), tl.sqrt(true)) * clip_all)
    step = tl.maximum(step, 1)
    weight_kept = lr * 0 + 1
    if DECAYS:
        weight_kept = 1 - lr * decay
    columns = (
        tl.where(averages > 0, factor * (1 - beta1), factor), 1 - beta1, beta2, 1 - beta2,
        1 / (1 - _power(beta1, step)), 1 / tl.sqrt(1 - _power(beta2, step)), eps, lr * lr_ratio, weight_kept, decay,
        bound, beta1,
    )  # fmt: skip
    for i in tl.static_range(COLUMNS):
        tl.store(coefficients + COLUMNS * row + i, columns[i].to(tl.float32), mask=mask)


@triton.jit
def _clip_factor(limit, norm):
    """Factor that clips a norm to its limit, at most 1; NaN stays NaN."""
    factor = limit / (norm + 1e-6)
    return tl.where(factor > 1, 1.0, factor)


@triton.jit
def _power(base, exponent):
    result = base * 0 + 1
    for _ in tl.static_range(31):
        result = tl.where(exponent % 2 > 0, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result
