"""The optimizer contract: one step of many tensors, with one launch per `Layout`.

Arithmetic is FP32, in the order of operations of `reference.py`: no fused multiply-add, and correctly rounded
divisions and roots. So codes are bit-identical on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.gradient import reference as gradients
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.storage import BF16, E4M3, GRADIENT_CODES, Float, Scaling, Storage

Rule = Literal["adamw", "adam", "lion", "given"]

COEFFICIENTS = (
    "factor",  # gradient *= factor: 1 / loss scale, the clip coefficient, -1 to maximise
    "first_share",  # 1 - beta1
    "second_decay",  # beta2
    "second_share",  # 1 - beta2
    "first_correction",  # 1 / (1 - beta1^t)
    "root_correction",  # 1 / sqrt(1 - beta2^t)
    "eps",
    "lr",
    "weight_kept",  # 1 - lr * weight_decay
    "weight_decay",
    "largest_update",  # bound of |update|, in learning rates
    "first_decay",  # beta1, of `momentum`
)
"""Coefficients of a step per tensor, FP32, one column each. Divisions are precomputed in FP64."""


class Layout(NamedTuple):
    """Parameters shared by all tensors of a launch."""

    rule: Rule
    weight: torch.dtype
    """FP32, BF16, FP16, or float8_e4m3fn with one scale per row."""
    gradient: torch.dtype
    """FP32, BF16, FP16; or float8_e4m3fn or float8_e5m2 with scales as in `gradient_scaling`."""
    first: Storage | None
    """First moment; None for the rule `given`, which has no moments."""
    second: Storage | None
    """Second moment; None for rules without one."""
    remainder_bits: int = 0
    """Bits of the FP32 master stored beside a BF16 or FP8 weight; lower mantissa bits are rounded off."""
    master: Storage | None = None
    """Separate master of the weight; the weight is the master rounded to nearest."""
    stochastic: bool = True
    """Stochastic rounding of moments and master, or of a weight without a master."""
    gradient_scaling: Scaling = "none"
    """Scaling of an FP8 gradient: E8M0 scales, as written by `store_gradient`."""

    @property
    def is_exact(self) -> bool:
        """Whether all moments are FP32; True without moments."""
        return all(moment is None or moment.is_exact for moment in (self.first, self.second))

    @property
    def draws(self) -> bool:
        """Whether an update needs random bits: rounding is stochastic, and something that is stored is rounded."""
        stored = self.weight == torch.float32 if self.master is None else self.master.is_exact
        return self.stochastic and not (self.is_exact and stored)

    @property
    def searches(self) -> bool:
        """Whether a stored value has a per-tensor scale, which takes an extra amax pass."""
        return any(s is not None and s.scaling == "tensor" for s in (self.first, self.second, self.master))

    @property
    def split(self) -> tuple[Float, int] | None:
        """Format of the weight and number of mantissa bits rounded off; None without a remainder."""
        if not self.remainder_bits:
            return None
        fmt = E4M3 if self.weight == E4M3.dtype else BF16
        return fmt, max(fmt.dropped - self.remainder_bits, 0)


class Slot(NamedTuple):
    """One tensor and its state, all contiguous matrices (R, C)."""

    row: int
    """Row in `Control`."""
    number: int
    """Stream of random bits."""
    weight: Tensor
    weight_scale: Tensor | None
    """FP32 (R, 1), for an FP8 weight."""
    gradient: Tensor
    master: Tensor | None
    """Remainder, int8 or int16, or separate master."""
    master_scale: Tensor | None
    first: Tensor | None
    first_scale: Tensor | None
    second: Tensor | None
    second_scale: Tensor | None
    gradient_scale: Tensor | None = None
    """uint8, for an FP8 gradient: (R, ceil(C / 128)), or (1, 1) for the scaling `tensor`."""


class Control(NamedTuple):
    """Inputs and counters of a step, on the device."""

    coefficients: Tensor
    """FP32 (P, len(COEFFICIENTS)), indexed by `Slot.row`."""
    steps: Tensor
    """int32 (P,): step number per row, from 1; part of the Philox counter."""
    skip: Tensor
    """int32 (1,): nonzero to skip the step."""
    clamped: Tensor
    """int64 (1,): counts update elements clamped to their bound."""
    seed: int


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: PinnedStaging) -> None:
    """Make one step, in place. `uploads` caches the address table between steps.

        adamw   m += (g - m) (1 - b1);  v = v b2 + g^2 (1 - b2);  u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
                w = w (1 - lr wd) - lr clamp(u)
        adam    as adamw after g += wd w, with wd = 0 in the last line
        lion    u = sign(m + (g - m) (1 - b1));  m += (g - m) (1 - b2);  w = w (1 - lr wd) - lr u
        given   u = g, a precomputed update, such as Muon's; no moments;  w = w (1 - lr wd) - lr clamp(u)

    The divisor of u is at least 2^-70: squares of smaller gradients underflow in FP32, and eps may be 0.

    Sources: arXiv 1711.05101, algorithm 2; 1412.6980, algorithm 1; 2302.06675, algorithm 2.

    Random bits are Philox words: for index i in the padded groups of a tensor, word i % 4 at counter (i / 4, number,
    step). Its low half rounds m, its high half v, and the high half of its product with 0x9E3779B9 the weight.
    """
    if slots:
        run_kernel("optimizer.update", control.skip, (slots, layout, control, uploads), "optimizer")


def momentum(
    slots: Sequence[Slot],
    layout: Layout,
    control: Control,
    updates: Sequence[Tensor],
    uploads: PinnedStaging,
    *,
    nesterov: bool = True,
) -> None:
    """Accumulate gradients into first moments, in place, and write updates for orthogonalisation.

        m = b1 m + g;  update = g + b1 m  (m without nesterov), from the new m before rounding

    Reads only the gradient, the first moment, `row` and `number` of a slot, and the columns `factor` and `first_decay`
    of the coefficients. Random bits are those of the first moment in `update`. A skipped step writes nothing, updates
    included.

    Args:
        updates: BF16, shaped like the weights, contiguous; rounded to nearest, ties to even.

    Source: Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon).
    """
    if slots:
        arguments = slots, layout, control, updates, uploads, nesterov
        run_kernel("optimizer.momentum", control.skip, arguments, "momentum")


def store_gradient(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    """Quantise a gradient into the given FP8 codes and E8M0 scales, the format of an FP8 `Slot.gradient`.

    Rounded to nearest, ties to even. A scale is the smallest power of two, at least 2^-126, for which the largest
    finite value fits. Non-finite values are preserved for overflow detection: E5M2 has codes for infinities and NaN,
    E4M3 stores both as NaN.

    Args:
        gradient: FP32, BF16 or FP16 (R, C), contiguous.
        codes: float8_e4m3fn or float8_e5m2 (R, C), contiguous.
        scale: uint8 (R, ceil(C / 128)) for `group`, (1, 1) for `tensor`.

    Raises:
        ConfigError: another scaling or dtype, codes or scales of another shape, or a tensor that is not contiguous.
    """
    _check_stored(gradient, codes, scale, scaling)
    if gradient.numel():
        run_kernel("gradient.store_gradient", gradient, (gradient, codes, scale, scaling), "gradient storage")


def load_gradient(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise a stored gradient to FP32 (R, C). The scaling follows from the shape of the scales."""
    return gradients.load_gradient(codes, scale)


def squares(tensors: Sequence[Tensor], uploads: PinnedStaging, scales: Sequence[Tensor | None] | None = None) -> Tensor:
    """Return the sum of squares of each tensor, FP64 (P,), read once in its own dtype.

    Tensors must be dense in memory, with dimensions in any order. FP8 codes must be matrices (R, C).

    Squares are exact and accumulated in FP64, so that the result rounded to FP32 does not depend on the order.

    Args:
        scales: per tensor, uint8 (R, ceil(C / 128)) or (1, 1) for FP8 codes, else None.

    Raises:
        ConfigError: there are no tensors.
    """
    if not tensors:
        raise ConfigError("squares: there are no tensors to sum. Pass at least one.")
    scales = [None] * len(tensors) if scales is None else scales
    like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    sums: Tensor = run_kernel("gradient.squares", like, (tensors, scales, uploads), "gradient norm")
    return sums


def _check_stored(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    if codes.dtype not in GRADIENT_CODES or gradient.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"store_gradient: {gradient.dtype} to {codes.dtype}: gradients are FP32, BF16 or FP16, codes E4M3 or E5M2."
        )
    if scaling not in ("tensor", "group") or scale.dtype != torch.uint8:
        raise ConfigError(
            f"store_gradient: scaling '{scaling}' in {scale.dtype}: pass 'group' or 'tensor', and scales in uint8."
        )
    shape = Storage(GRADIENT_CODES[codes.dtype], scaling).scale_shape(*gradient.shape)
    if codes.shape != gradient.shape or scale.shape != shape:
        raise ConfigError(
            f"store_gradient: a gradient {tuple(gradient.shape)} needs codes of its shape and scales {shape},"
            f" got {tuple(codes.shape)} and {tuple(scale.shape)}."
        )
    if not (gradient.is_contiguous() and codes.is_contiguous() and scale.is_contiguous()):
        raise ConfigError("store_gradient: the gradient, its codes and its scales must be contiguous.")
