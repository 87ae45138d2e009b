"""Reference grouped FP8 GEMMs: a loop over the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.gemm.reference import gemm
from octavo.kernels.grouped.padding import padded_ends
from octavo.kernels.grouped.reference import groups_of
from octavo.numerics import PER_ROW, Quantized

Multiply = Callable[[Quantized, Quantized, torch.dtype], Tensor]
"""The GEMM of one expert."""


def grouped_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    fast: bool = False,
    multiply: Multiply = gemm,
) -> Tensor:  # fmt: skip
    """Return a[t] . b[e(t)]^T, (T, R), for a (T, C) and b (E, R, C). `fast` is ignored: `multiply` decides."""
    y = a_scale.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    b_scale = a_scale.new_ones(b.shape[:2]) if b_scale is None else b_scale
    for e, tokens in enumerate(groups_of(ends)):
        right = Quantized(b[e], b_scale[e][:, None], PER_ROW)
        y[tokens] = multiply(Quantized(a[tokens], a_scale[tokens], PER_ROW), right, out_dtype)
    return y


def grouped_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    multiply: Multiply = gemm,
) -> Tensor:  # fmt: skip
    """Return the products (E, N, K) of the groups of a (N, P) and b (K, P). ends: end offsets before padding."""
    b_scale = a_scale.new_ones(len(ends), b.shape[0]) if b_scale is None else b_scale
    parts = [
        multiply(
            Quantized(a[:, tokens].contiguous(), a_scale[e][:, None], PER_ROW),
            Quantized(b[:, tokens].contiguous(), b_scale[e][:, None], PER_ROW),
            out_dtype,
        )
        for e, tokens in enumerate(groups_of(padded_ends(ends)))
    ]
    return torch.stack(parts)
