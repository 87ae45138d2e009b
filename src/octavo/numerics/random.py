"""Random bits from a counter: Philox-4x32-10 (Salmon et al., SC'11, section 3.3).

The bits of an element depend on the seed and the element's index alone, so the same codes come out on every device, in
every order, and after a resume. Triton's `tl.randint(seed, offset)` gives the same stream.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)


def random_bits(seed: int | Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 values in [0, 2^32), element i drawn for counter i (row-major).

    Args:
        seed: 64 bits; as an int64 tensor of one element it stays on its device.
    """
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    return random_words(seed, counter)[0].reshape(shape)


def random_words(
    seed: int | Tensor, counter: Tensor, stream: int | Tensor = 0, step: int | Tensor = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter, int64 values in [0, 2^32), in the shape of `counter`.

    Args:
        seed: 64 bits; as an int64 tensor of one element it stays on its device.
        counter: int64, the low 32 bits of the counter.
        stream: 32 bits: the second word of the counter; int64 where it is a tensor.
        step: 32 bits: the third, likewise.
    """
    c0: Any = counter & _MASK
    c1, c2, c3 = cast(Any, stream), cast(Any, step), cast(Any, 0)  # one for all, until rounds have mixed them
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER[0])
        high1, low1 = _multiply(c2, _MULTIPLIER[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEP[0]) & _MASK, (k1 + _KEY_STEP[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and the low 32 bits of a 32 x 32 bit product. In int64 it wraps, and has the same 64 bits."""
    product = x * factor
    return (product >> 32) & _MASK, product & _MASK
