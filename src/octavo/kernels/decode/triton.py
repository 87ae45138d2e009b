"""Values of rotated codes, one whole row per program, as they are made (`kernels.quantize.triton`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import rotate
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import next_power_of_2, row_warps


def decode_rows(codes: Tensor, scale: Tensor, block: int, out: Tensor) -> None:
    """See `octavo.kernels.decode.decode_rows`; block: size of H."""
    rows, cols = codes.shape
    size = next_power_of_2(cols)
    # No product may be fused with the first addition of the rotation, which the specification rounds apart.
    DECODE[(rows,)](codes, scale, out, cols, BLOCK=block, SIZE=size, num_warps=row_warps(size), enable_fp_fusion=False)


@triton.jit
def _decode_kernel(codes_ptr, scale_ptr, out_ptr, cols, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    mask = columns < cols
    codes = tl.load(codes_ptr + row * cols + columns, mask=mask, other=0).to(tl.float32)
    values = rotate(codes * tl.load(scale_ptr + row), BLOCK)
    tl.store(out_ptr + row * cols + columns, to_dtype(values, out_ptr.dtype.element_ty), mask=mask)


DECODE = Kernel(_decode_kernel)
