"""The byte transpose of FP8 codes, (R, C) to (C, R), to reuse operands of fprop in backward GEMMs."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.runtime.dispatch import runs_triton
from octavo.kernels.runtime.operation import operation
from octavo.kernels.transpose import reference
from octavo.numerics import PER_ROW, Quantized


def _in_graph(codes: Tensor, _after: Tensor | None) -> bool:
    return runs_triton(codes)


def _fake(codes: Tensor, _after: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


def _folded_fake(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    return _fake(codes, after), codes.new_empty(codes.shape[1], 1, dtype=torch.float32)


@operation(reference=reference.transpose, fake=_fake, in_graph=_in_graph)
def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the transpose (C, R), contiguous, of contiguous codes (R, C) of any one-byte dtype.

    Args:
        after: a tensor to order the transpose after. Without this dependency a compiler could move it into forward,
            and keep the result in memory until backward.
    """


def transpose_folded(codes: Tensor, after: Tensor) -> Quantized:
    """Return codes (R, C) transposed, with scale 1 per row: the scales are folded into the other operand.

    Args:
        after: the other operand, as for `transpose`.
    """
    return Quantized(*_transpose_folded(codes, after), PER_ROW)


@operation(reference=reference.transpose_folded, fake=_folded_fake, in_graph=_in_graph, ledger="transpose")
def _transpose_folded(codes: Tensor, after: Tensor) -> tuple[Tensor, Tensor]: ...
