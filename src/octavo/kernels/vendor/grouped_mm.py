"""`torch._scaled_grouped_mm`: a scale per row, E4M3 by E4M3, BF16 out (Hopper and later); `torch._grouped_mm` for BF16.

Along the sum groups must not be empty and start at multiples of 16; along the rows they may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.dispatch import architecture


def unsupported_reason(a: Tensor, b: Tensor) -> str | None:
    """Return why the grouped GEMM cannot take codes a (.., C) and b (.., C), or None."""
    if not a.is_cuda:
        return "PyTorch has no scaled grouped GEMM for a CPU"
    if not (found := architecture(a.device)).grouped:
        return f"PyTorch's scaled grouped GEMM by rows is Hopper's, this is {found.name}"
    if torch.float8_e5m2 in (a.dtype, b.dtype):
        return "row scales take E4M3 operands only"
    if a.shape[-1] % 16 or b.shape[-2] % 16:
        return f"{a.shape[-1]} columns or {b.shape[-2]} rows are no multiple of 16"
    return None


def grouped_gemm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a[t] . b[e(t)]^T, (T, R), rounded to BF16 whatever `out_dtype` is."""
    y = torch._scaled_grouped_mm(
        a, b.mT, a_scale.reshape(-1), b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return y.to(out_dtype)


def grouped_wgrad(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return the products (E, N, K) of the groups of a (N, P) and b (K, P), rounded to BF16. ends: padded."""
    dw = torch._scaled_grouped_mm(
        a, b.t(), a_scale.reshape(-1), b_scale.reshape(-1), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    return dw.to(out_dtype)


def unsupported_reason_high_precision(a: Tensor, b: Tensor) -> str | None:
    """Return why `torch._grouped_mm` cannot take a and b, or None."""
    if not a.is_cuda or 0 in (*a.shape, *b.shape):
        return "there is nothing to gain on a CPU or for empty operands"
    if a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device)[0] < 9:
        return f"it is fast for BF16 on Hopper and later, this is {a.dtype}"
    features = (a.shape[0], b.shape[1]) if b.dim() == 2 else b.shape[1:]
    return f"{features[0]} or {features[1]} features are no multiple of 8" if any(n % 8 for n in features) else None


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """See `octavo.kernels.grouped.grouped_mm`."""
    return torch._grouped_mm(a, b, offs=ends)
