"""The optimizer contract: one step of many tensors, each in the storage that it has, in one launch a kind of storage.

Everything is computed in FP32, operation by operation as `reference/optimizer.py` writes it down: no multiplication is
fused with an addition, divisions and roots are correctly rounded. So the codes are equal to the bit on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.dispatch import run_twin
from octavo.kernels.reference import gradient as reference
from octavo.kernels.storage import BF16, E4M3, GRADIENT_CODES, Float, Scaling, Storage
from octavo.kernels.transfers import PinnedStaging

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
"""What a step takes for each tensor, FP32, one a column. Divisions are made beforehand, in FP64."""


class Layout(NamedTuple):
    """What all tensors of a launch have in common."""

    rule: Rule
    weight: torch.dtype
    """FP32, BF16, FP16, or float8_e4m3fn with one scale per row."""
    gradient: torch.dtype
    """FP32, BF16, FP16; or float8_e4m3fn and float8_e5m2 with the scales of `gradient_scaling`."""
    first: Storage | None
    """None for the rule `given`, which has no moments."""
    second: Storage | None
    """None for a rule that has no second moment."""
    remainder_bits: int = 0
    """Of the weight's FP32 master, kept beside a BF16 or FP8 weight; the mantissa bits behind them are rounded off."""
    master: Storage | None = None
    """A master kept apart from the weight; the weight is that value, rounded to nearest."""
    stochastic: bool = True
    """How all but the weight's own codes is rounded."""
    gradient_scaling: Scaling = "none"
    """Of a gradient that is FP8 codes: E8M0 scales, as `store_gradient` writes them."""

    @property
    def is_exact(self) -> bool:
        """Whether the moments are FP32; so they are where there are none."""
        return all(moment is None or moment.is_exact for moment in (self.first, self.second))

    @property
    def searches(self) -> bool:
        """Whether something that is written has one scale per tensor, which a first pass finds."""
        return any(s is not None and s.scaling == "tensor" for s in (self.first, self.second, self.master))

    @property
    def split(self) -> tuple[Float, int] | None:
        """The weight's format and the mantissa bits that are rounded off, where there is a remainder."""
        if not self.remainder_bits:
            return None
        fmt = E4M3 if self.weight == E4M3.dtype else BF16
        return fmt, max(fmt.dropped - self.remainder_bits, 0)


class Slot(NamedTuple):
    """One tensor and its state, all of them matrices (R, C) whose memory is contiguous."""

    row: int
    """Its row in `Control`."""
    number: int
    """Which stream of random bits is its own."""
    weight: Tensor
    weight_scale: Tensor | None
    """FP32 (R, 1), of an FP8 weight."""
    gradient: Tensor
    master: Tensor | None
    """The remainder, int8 or int16, or the master kept apart."""
    master_scale: Tensor | None
    first: Tensor | None
    first_scale: Tensor | None
    second: Tensor | None
    second_scale: Tensor | None
    gradient_scale: Tensor | None = None
    """uint8, of a gradient that is FP8 codes: (R, ceil(C / 128)), or (1, 1) where the scaling is `tensor`."""


class Control(NamedTuple):
    """What a step reads and counts on the device."""

    coefficients: Tensor
    """FP32 (P, len(COEFFICIENTS)); a slot names its row."""
    steps: Tensor
    """int32 (P,): the number of this step, from 1, for each row; of their random bits."""
    skip: Tensor
    """int32 (1,): not 0 to leave everything as it is."""
    clamped: Tensor
    """int64 (1,): counts updates that were held at their bound."""
    seed: int


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: PinnedStaging) -> None:
    """Make one step, in place. `uploads` keeps from step to step where the tensors lie.

        adamw   m += (g - m) (1 - b1);  v = v b2 + g^2 (1 - b2);  u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
                w = w (1 - lr wd) - lr clamp(u)
        adam    the same with g += wd w before it, and wd = 0 in the last line
        lion    u = sign(m + (g - m) (1 - b1));  m += (g - m) (1 - b2);  w = w (1 - lr wd) - lr u
        given   u = g, an update that is ready, as Muon's is; no moments;  w = w (1 - lr wd) - lr clamp(u)

    Sources: arXiv 1711.05101, algorithm 2; 1412.6980, algorithm 1; 2302.06675, algorithm 2.

    Random bits are words of Philox: of the value with index i among its tensor's groups, word i % 4 of the counter
    (i / 4, number, step); its low half rounds m, its high half v, and that of its product with 0x9E3779B9 the weight.
    """
    if slots:
        run_twin("optimizer.update", control.skip, (slots, layout, control, uploads), "optimizer")


def momentum(
    slots: Sequence[Slot],
    layout: Layout,
    control: Control,
    updates: Sequence[Tensor],
    uploads: PinnedStaging,
    *,
    nesterov: bool = True,
) -> None:
    """Add gradients to first moments, in place, and write the updates that an orthogonalisation begins with.

        m = b1 m + g;  update = g + b1 m  (m itself without nesterov), of the new m before it is rounded

    Only the gradient, the first moment and `number` of a slot are read, and the columns `factor` and `first_decay` of
    the coefficients. Random bits are those of the first moment in `update`. A step that is skipped writes nothing, the
    updates included.

    Args:
        updates: BF16, of the shapes of the weights, contiguous; rounded to nearest, ties to even.

    Source: Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon).
    """
    if slots:
        arguments = slots, layout, control, updates, uploads, nesterov
        run_twin("optimizer.momentum", control.skip, arguments, "momentum")


def store_gradient(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    """Quantise a gradient into FP8 codes with E8M0 scales, in place: what a slot's gradient may be.

    Rounded to nearest, ties to even. A scale is the smallest power of two (at least 2^-126) with which the largest
    finite value fits; values that are not finite stay so: E5M2 has codes for infinities and NaN, E4M3 writes both as
    NaN. So the search for overflows still sees them.

    Args:
        gradient: FP32, BF16 or FP16 (R, C), contiguous.
        codes: float8_e4m3fn or float8_e5m2 (R, C), contiguous.
        scale: uint8 (R, ceil(C / 128)) for `group`, (1, 1) for `tensor`.

    Raises:
        ConfigError: a scaling or a dtype that is none of these, codes or scales of another shape, or not contiguous.
    """
    _check_stored(gradient, codes, scale, scaling)
    if gradient.numel():
        run_twin("gradient.store_gradient", gradient, (gradient, codes, scale, scaling), "gradient storage")


def load_gradient(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the FP32 values of a stored gradient, (R, C). The scaling is seen from the shape of the scales."""
    return reference.load_gradient(codes, scale)


def squares(tensors: Sequence[Tensor], uploads: PinnedStaging, scales: Sequence[Tensor | None] | None = None) -> Tensor:
    """Return the sum of the squares of each tensor, FP64 (P,), from one read of them in their own dtype.

    Each must be contiguous in memory, in whatever order of its dimensions. FP8 codes must be matrices (R, C).

    The squares are exact and their sum is made in FP64, so that its FP32 rounding does not depend on the order.

    Args:
        scales: of tensors that are FP8 codes, uint8, (R, ceil(C / 128)) or (1, 1); None where there are none.
    """
    if not tensors:
        raise ConfigError("there are no tensors whose squares could be summed.")
    scales = [None] * len(tensors) if scales is None else scales
    like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    sums: Tensor = run_twin("gradient.squares", like, (tensors, scales, uploads), "gradient norm")
    return sums


def _check_stored(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    if codes.dtype not in GRADIENT_CODES or gradient.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"store_gradient: {gradient.dtype} in {codes.dtype}: gradients are FP32, BF16 or FP16, codes E4M3 or E5M2."
        )
    if scaling not in ("tensor", "group") or scale.dtype != torch.uint8:
        raise ConfigError(f"store_gradient: scaling '{scaling}' in {scale.dtype}: pass 'group' or 'tensor', in uint8.")
    shape = Storage(GRADIENT_CODES[codes.dtype], scaling).scale_shape(*gradient.shape)
    if codes.shape != gradient.shape or scale.shape != shape:
        raise ConfigError(
            f"store_gradient: a gradient {tuple(gradient.shape)} needs codes of its shape and scales {shape},"
            f" these are {tuple(codes.shape)} and {tuple(scale.shape)}."
        )
    if not (gradient.is_contiguous() and codes.is_contiguous() and scale.is_contiguous()):
        raise ConfigError("store_gradient: the gradient, its codes and its scales must be contiguous.")
