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
from octavo.kernels.dispatch import launches_on, uses_triton
from octavo.kernels.reference import optimizer as reference
from octavo.kernels.storage import BF16, E4M3, Float, Storage
from octavo.kernels.uploads import Uploads

Rule = Literal["adamw", "adam", "lion"]

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
)
"""What a step takes for each tensor, FP32, one a column. Divisions are made beforehand, in FP64."""


class Layout(NamedTuple):
    """What all tensors of a launch have in common."""

    rule: Rule
    weight: torch.dtype
    """FP32, BF16, FP16, or float8_e4m3fn with one scale a row."""
    gradient: torch.dtype
    first: Storage
    second: Storage | None
    """None for a rule that has no second moment."""
    remainder_bits: int = 0
    """Of the weight's FP32 master, kept beside a BF16 or FP8 weight; the mantissa bits behind them are rounded off."""
    master: Storage | None = None
    """A master kept apart from the weight; the weight is that value, rounded to nearest."""
    stochastic: bool = True
    """How all but the weight's own codes is rounded."""

    @property
    def is_exact(self) -> bool:
        """Whether the moments are FP32."""
        return self.first.is_exact and (self.second is None or self.second.is_exact)

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
    first: Tensor
    first_scale: Tensor | None
    second: Tensor | None
    second_scale: Tensor | None


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


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: Uploads) -> None:
    """Make one step, in place. `uploads` keeps from step to step where the tensors lie.

        adamw   m += (g - m) (1 - b1);  v = v b2 + g^2 (1 - b2);  u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
                w = w (1 - lr wd) - lr clamp(u)
        adam    the same with g += wd w before it, and wd = 0 in the last line
        lion    u = sign(m + (g - m) (1 - b1));  m += (g - m) (1 - b2);  w = w (1 - lr wd) - lr u

    Sources: arXiv 1711.05101, algorithm 2; 1412.6980, algorithm 1; 2302.06675, algorithm 2.

    Random bits are words of Philox: of the value with index i among its tensor's groups, word i % 4 of the counter
    (i / 4, number, step); its low half rounds m, its high half v, and that of its product with 0x9E3779B9 the weight.
    """
    if not slots:
        return
    if uses_triton(slots[0].weight, "optimizer"):
        from octavo.kernels.triton import optimizer as fast

        with launches_on(slots[0].weight.device):
            fast.update(slots, layout, control, uploads)
        return
    if bool(control.skip):
        return
    for slot in slots:
        reference.update(slot, layout, control)


def squares(tensors: Sequence[Tensor], uploads: Uploads) -> Tensor:
    """Return the sum of the squares of each tensor, FP64 (P,), from one read of them in their own dtype.

    Each must be contiguous in memory, in whatever order of its dimensions.

    The squares are exact and their sum is made in FP64, so that its FP32 rounding does not depend on the order.
    """
    if not tensors:
        raise ConfigError("there are no tensors whose squares could be summed.")
    if uses_triton(tensors[0], "gradient norm"):
        from octavo.kernels.triton import optimizer as fast

        with launches_on(tensors[0].device):
            return fast.squares(tensors, uploads)
    return torch.stack([tensor.double().square().sum() for tensor in tensors])
