"""Roundings: casts of FP32 values to the dtype of a store, and products that nothing is fused with."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.codes import INTERPRETED


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    """Round FP32 to the nearest BF16, FP16 or FP32, ties to even. Only Triton's interpreter would truncate to BF16."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded_product(x, y):
    """Rounded product, never contracted into an FMA: tracing compilers drop `enable_fp_fusion`."""
    if INTERPRETED:
        return x * y
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)
