"""The coefficients contract: scalars of an optimizer step per parameter, from hyperparameters and gradient clipping.

Everything is computed in FP64 and rounded once, to FP32; powers of betas by repeated squaring, so that they are
bit-identical on every device. No synchronisation with a GPU: one launch there, preceded by one for the norm.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.transfers import PinnedStaging

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "clip", "clip_all")
"""Per group: hyperparameters; sign, -1 to maximise; clip norm of the group; global clip norm, equal in all rows."""


class ParamSettings(NamedTuple):
    """Settings per parameter, in addition to those of its group."""

    group: int
    bound: float
    """Upper bound of |update|, in units of the learning rate."""
    lr_ratio: float = 1.0
    """Learning rate relative to that of the group."""
    averages: bool = False
    """Whether gradients are weighted by 1 - beta1, so that momentum is an average, not the plain sum of the kernel."""


class StepInputs(NamedTuple):
    """Inputs of `coefficients`, on the device."""

    hyper: Tensor
    """FP64 (G, len(HYPER)), one row per group."""
    own: Tensor
    """FP64 (P, len(ParamSettings._fields)), one row per parameter; P may be 0."""
    group_squares: Tensor | None
    """FP64 (G,), sums of squares of the gradients before unscaling, over all ranks; None if no norm is needed."""
    decays_weights: bool
    """Whether weight decay is decoupled; False for Adam, which adds it to the gradient."""
    grad_scale: Tensor | None = None
    """One element: loss scale of the gradients, divided out."""
    found_inf: Tensor | None = None
    """One element: above 0 if an overflow was already detected."""


class StepCoefficients(NamedTuple):
    """Results of `coefficients`."""

    coefficients: Tensor
    """FP32 (P, len(octavo.kernels.optimizer.COEFFICIENTS))."""
    steps: Tensor
    """int32 (P,), number of this step, from 1; unchanged if the step is skipped."""
    skip: Tensor
    """int32 (1,): 1 to skip the step, as a gradient is not finite."""
    norm: Tensor | None
    """FP32 (): global norm of the unscaled gradients, before clipping."""


def group_squares(squares: Tensor, own: Tensor, groups: int) -> Tensor:
    """Sum squares per parameter, FP64 (P,), into squares per group, FP64 (G,), deterministically."""
    sums: Tensor = run_kernel("coefficients.group_squares", squares, (squares, own, groups), "gradient norm")
    return sums


def coefficients(
    inputs: StepInputs, counts: Sequence[Tensor], skipped: Tensor, uploads: PinnedStaging, name: Hashable = None
) -> StepCoefficients:
    """Return the coefficients of a step, and increment its counters.

    Gradients are clipped per group first, then globally. As in `torch.nn.utils.clip_grad_norm_`, gradients with a norm
    above the limit are multiplied by limit / (norm + 1e-6).

    Args:
        counts: FP32 () per parameter: steps made so far, incremented in place unless this step is skipped.
        skipped: int32 (1,), number of skipped steps, incremented in place.
        uploads: caches the address table of `counts` between steps, under `name`.
    """
    arguments = inputs, counts, skipped, uploads, name
    result: StepCoefficients = run_kernel(
        "coefficients.coefficients", inputs.hyper, arguments, "optimizer coefficients"
    )
    return result
