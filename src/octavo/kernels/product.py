"""High-precision products of Octavo itself, which `octavo.autocast` leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.runtime.operation import operation

_BY_DIM = {2: torch.ops.aten.mm.default, 3: torch.ops.aten.bmm.default, 4: torch.ops.aten.matmul.default}


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A B for matrices or batches. Unlike `A @ B`, not intercepted by `octavo.autocast` as a user's product."""
    result: Tensor = _BY_DIM[a.dim()](a, b)
    return result


def rounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return A B of matrices, summed in FP32 and rounded once, to `dtype`.

    A single operator, so that selective checkpointing saves the result, not the FP32 sums.

    Args:
        a: (M, K), FP32 or BF16.
        b: (K, N), as a.
    """
    result: Tensor = torch.ops.octavo.rounded_product(a, b, dtype)
    return result


@operation(fake=lambda a, b, dtype: a.new_empty(a.shape[0], b.shape[1], dtype=dtype))
def _rounded_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)  # no partial sums in BF16
    return product(a.float(), b.float()).to(dtype)
