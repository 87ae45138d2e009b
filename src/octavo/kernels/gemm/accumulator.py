"""Bit-exact emulation of Hopper's FP8 accumulator, on any device.

A tensor core accumulates 32 products per step. It aligns products and accumulator to their largest exponent, truncates
each toward zero to 13 fraction bits, adds them exactly, and truncates the sum to 13 fraction bits again. As nothing is
rounded up, sums of one sign are biased toward zero. `fast` accumulation is one such chain over all of K; `slow` starts
a new chain every 128 products and adds the chains in FP32, as on CUDA cores.

The exponent of a product is the sum of the exponents of its codes, before normalisation; a subnormal code has the
smallest normal exponent; zero products are ignored. Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores",
arXiv 2512.07004, and Xie et al., "MMA-Sim", arXiv 2511.10909, derived these rules by probing the hardware.

Sums of INT8 are exact. Split-K in cuBLAS (on small outputs) is not modelled.

M: rows of a, N: rows of b, K: reduction dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.gemm.reference import gemm as reference_gemm
from octavo.kernels.product import product
from octavo.numerics import Quantized, format_of

PRODUCTS = 32
"""Products per step."""
FRACTION_BITS = 13
"""Fraction bits of every term of a step, relative to the largest exponent, and of the sum."""
CHAIN = 128
"""Products per chain in slow accumulation."""

_FP32_FRACTION_BITS = 23
_TRUNCATION_MASK = -(1 << (_FP32_FRACTION_BITS - FRACTION_BITS))
"""Mask of the bits of an FP32 number that the accumulator keeps."""
_ZERO = -60
"""Exponent that represents zero: below any product and accumulator, and its double fits in int8."""


def matmul(a_codes: Tensor, b_codes: Tensor, accumulate: Literal["slow", "fast"] = "slow") -> Tensor:
    """Return a . b^T as on Hopper's tensor cores, before scaling: FP32 (M, N).

    Args:
        a_codes: (M, K), E4M3 or E5M2.
        b_codes: (N, K), E4M3 or E5M2.
        accumulate: `fast`: one chain over all of K; `slow`: one per 128 products.
    """
    if accumulate == "fast":
        return chain(a_codes, b_codes)
    total = torch.zeros(a_codes.shape[0], b_codes.shape[0], device=a_codes.device, dtype=torch.float32)
    for start in range(0, a_codes.shape[1], CHAIN):
        total += chain(a_codes[:, start : start + CHAIN], b_codes[:, start : start + CHAIN])
    return total


def chain(a_codes: Tensor, b_codes: Tensor) -> Tensor:
    """Return a . b^T from one chain of steps that starts at zero. Arguments and result as for `matmul`.

    Results that are non-finite in IEEE arithmetic are returned as such.
    """
    a, b = a_codes.float(), b_codes.float()
    a_finite, b_finite = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    a_exponent, b_exponent = _exponents(a_finite, a_codes), _exponents(b_finite, b_codes)
    result = torch.empty(a.shape[0], b.shape[0], device=a.device, dtype=torch.float32)
    for m, n in _tiles(result):
        result[m, n] = _chain_of_tile(a_finite[m], a_exponent[m], b_finite[n], b_exponent[n])
    if bool(a.isfinite().all()) and bool(b.isfinite().all()):
        return result
    ieee = product(a, b.t())
    return torch.where(ieee.isfinite(), result, ieee)


def _exponents(values: Tensor, codes: Tensor) -> Tensor:
    """Return the exponent of each code as used by the tensor core, int8; `_ZERO` for zero."""
    smallest = _exponent(torch.tensor(format_of(codes).smallest_normal, device=codes.device, dtype=torch.float32))
    return torch.where(values == 0, _ZERO, torch.maximum(_exponent(values), smallest)).to(torch.int8)


def _exponent(x: Tensor) -> Tensor:
    """Return the unbiased exponent of FP32 numbers, int32; -127 for zero."""
    return ((x.view(torch.int32) >> _FP32_FRACTION_BITS) & 255) - 127


def _chain_of_tile(a: Tensor, a_exponent: Tensor, b: Tensor, b_exponent: Tensor) -> Tensor:
    """Return the accumulators (M, N) of an output tile after all of K."""
    accumulator = torch.zeros(a.shape[0], b.shape[0], device=a.device, dtype=torch.float32)
    for start in range(0, a.shape[1], PRODUCTS):
        step = slice(start, start + PRODUCTS)
        products = a[:, step].t()[:, :, None] * b[:, step].t()[:, None, :]
        exponents = a_exponent[:, step].t()[:, :, None] + b_exponent[:, step].t()[:, None, :]
        accumulator = _add(accumulator, products, exponents.amax(dim=0).int())
    return accumulator


def _add(accumulator: Tensor, products: Tensor, largest: Tensor) -> Tensor:
    """Return the accumulator after one step of the tensor core, exact in FP32: no term has more than 15 bits.

    Args:
        accumulator: FP32 (M, N).
        products: FP32 (32, M, N); overwritten.
        largest: largest exponent of the products, int32 (M, N).
    """
    aligned = torch.maximum(largest, _exponent(accumulator)).clamp_(min=_ZERO)
    unit = ((aligned - FRACTION_BITS + 127) << _FP32_FRACTION_BITS).view(torch.float32)
    total = products.div_(unit).trunc_().sum(dim=0) + (accumulator / unit).trunc()
    return ((total * unit).view(torch.int32) & _TRUNCATION_MASK).view(torch.float32)


def _tiles(result: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield output tiles of (M, N), sized for a CPU cache, or to occupy a GPU within its memory."""
    side = 1024 if result.is_cuda else 64
    for row in range(0, result.shape[0], side):
        for col in range(0, result.shape[1], side):
            yield slice(row, row + side), slice(col, col + side)


def unsupported_reason(a: Quantized, b: Quantized) -> str | None:
    """Return why Hopper's tensor cores do not support these operands, or None."""
    for operand in (a, b):
        if operand.granularity.cols not in (None, CHAIN) or operand.granularity.rows not in (None, 1, CHAIN):
            return f"no tensor core of Hopper takes {operand.granularity.name} scales"
    return None


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a . b^T as (M, N) of `out_dtype`, for operands with no `unsupported_reason`.

    Sums of INT8 are exact on Hopper too. Scales of tiles along K are applied to each chain in FP32 before it is added:
    such a GEMM is always slow. Others are applied to the result. Power-of-two scales are exact either way.
    """
    if a.codes.dtype == torch.int8:
        return reference_gemm(a, b, out_dtype)
    if a.granularity.cols is None and b.granularity.cols is None:
        total = matmul(a.codes, b.codes, "fast" if fast else "slow")
        return (total * (_scale(a, 0) * _scale(b, 0).t())).to(out_dtype)
    total = torch.zeros(a.codes.shape[0], b.codes.shape[0], device=a.codes.device, dtype=torch.float32)
    for tile, start in enumerate(range(0, a.codes.shape[1], CHAIN)):
        part = chain(a.codes[:, start : start + CHAIN], b.codes[:, start : start + CHAIN])
        total += part * (_scale(a, tile) * _scale(b, tile).t())
    return total.to(out_dtype)


def _scale(x: Quantized, tile: int) -> Tensor:
    """Return the scale per row for tile number `tile` of 128 columns, (rows, 1)."""
    column = x.scale if x.granularity.cols is None else x.scale[:, tile : tile + 1]
    rows, height = x.codes.shape[0], x.granularity.rows
    return column.expand(rows, 1) if height is None else column.repeat_interleave(height, dim=0)[:rows]


def exact(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Return a . b^T accumulated in FP64, rounded to FP32, then to `out_dtype`: free of accumulator error."""
    a_values, b_values = (x.codes.double() * x.granularity.expand(x.scale, *x.codes.shape) for x in (a, b))
    return product(a_values, b_values.t()).float().to(out_dtype)
