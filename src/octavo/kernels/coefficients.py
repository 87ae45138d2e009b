"""The coefficients contract: what a step multiplies by, a row per parameter, from settings and what clipping has found.

Everything is computed in FP64 and rounded once, to FP32; powers of betas by repeated squaring, so that they are the
same to the bit on every device. Nothing waits for a GPU: there it is one launch, and one before it for the norm.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.kernels.dispatch import run_twin
from octavo.kernels.transfers import PinnedStaging

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "clip", "clip_all")
"""Of a group: its settings, 1 or -1 to maximise, largest norm of its gradients; and of all, the same in each row."""


class ParamSettings(NamedTuple):
    """What a parameter has of its own, beside the settings of its group."""

    group: int
    bound: float
    """Of |update|, in learning rates."""
    lr_ratio: float = 1.0
    """Its learning rate, in that of its group."""
    averages: bool = False
    """Whether the momentum takes 1 - beta1 of a gradient, as an average does, where the kernel's adds all of it."""


class StepInputs(NamedTuple):
    """What coefficients are computed from, on the device."""

    hyper: Tensor
    """FP64 (G, len(HYPER)), a row a group."""
    own: Tensor
    """FP64 (P, len(ParamSettings._fields)), a row per parameter; P may be 0."""
    group_squares: Tensor | None
    """FP64 (G,), sums of the squares of gradients as they are, of all ranks; None: no norm is needed."""
    decays_weights: bool
    """Whether weight decay is decoupled: not in Adam, which adds it to the gradient."""
    grad_scale: Tensor | None = None
    """One element: what gradients are multiplied by, and hence divided by."""
    found_inf: Tensor | None = None
    """One element: above 0 where an overflow has been found already."""


class StepCoefficients(NamedTuple):
    """What a step takes."""

    coefficients: Tensor
    """FP32 (P, len(octavo.kernels.optimizer.COEFFICIENTS))."""
    steps: Tensor
    """int32 (P,), the number of this step, from 1; as before where it is skipped."""
    skip: Tensor
    """int32 (1,): 1 where a gradient is not finite."""
    norm: Tensor | None
    """FP32, shape (): the global norm before clipping, of gradients divided by their scale."""


def group_squares(squares: Tensor, own: Tensor, groups: int) -> Tensor:
    """Return the sums of squares of each group, FP64 (G,), from those of each parameter, (P,): the same every time."""
    sums: Tensor = run_twin("coefficients.group_squares", squares, (squares, own, groups), "gradient norm")
    return sums


def coefficients(
    inputs: StepInputs, counts: Sequence[Tensor], skipped: Tensor, uploads: PinnedStaging, name: Hashable = None
) -> StepCoefficients:
    """Return the coefficients of a step, and count it.

    Gradients are multiplied by the factors that clip first each group, then all, to their limits. As in
    `torch.nn.utils.clip_grad_norm_`, a norm above its limit is multiplied by limit / (norm + 1e-6).

    Args:
        counts: FP32, shape (), one a parameter: the steps that it has made. One more is added, unless this is skipped.
        skipped: int32 (1,), counts the steps that are skipped.
        uploads: keeps from step to step where the counts lie, as `name`.
    """
    arguments = inputs, counts, skipped, uploads, name
    made: StepCoefficients = run_twin("coefficients.coefficients", inputs.hyper, arguments, "optimizer coefficients")
    return made
