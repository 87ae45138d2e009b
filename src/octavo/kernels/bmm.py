"""The batched GEMM contract: many products of one shape in a call, and who fulfils it.

    bmm(a, b) = a_i . b_i^T for every i        a (B, M, K), b (B, N, K): FP8 codes; result (B, M, N), in `out_dtype`

Every matrix of a batch has its own scales. By definition it is a loop over `gemm`; a GPU that has a batched kernel for
such scales runs all of them in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels import ledger
from octavo.kernels.batch import Batch
from octavo.kernels.gemm import gemm, is_usual
from octavo.kernels.operator import call, define_packed
from octavo.kernels.vendor import grouped_bmm as vendor
from octavo.numerics import Quantized, granularity_named


def bmm(a: Batch, b: Batch, out_dtype: torch.dtype, accumulate: str = "slow") -> Tensor:
    """Return a_i . b_i^T for every i, (B, M, N). Any extent may be 0.

    Args:
        a: (B, M, K).
        b: (B, N, K).
        out_dtype: BF16, FP16 or FP32.
        accumulate: `slow` or `fast`, as for `gemm`.

    Raises:
        ConfigError: the shapes do not fit.
    """
    if a.codes.shape[::2] != b.codes.shape[::2]:
        raise ConfigError(
            f"bmm takes (B, M, K) and (B, N, K), got shapes {tuple(a.codes.shape)} and {tuple(b.codes.shape)}."
        )
    arguments = Quantized(*a), Quantized(*b), out_dtype, accumulate == "fast"
    result: Tensor = call("bmm", _bmm, arguments, [True])[0]
    return result


def why_looped(device: torch.device, a: tuple[str, str], b: tuple[str, str]) -> str | None:
    """Return why a device has no batched kernel for operands, each (format, granularity), or None."""
    names = ["tensor" if granularity == "column" else granularity for _, granularity in (a, b)]  # folded: one scale
    return vendor.refuses_kind(device, (a[0], b[0]), tuple(granularity_named(name) for name in names))


def _bmm(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast: bool) -> list[Tensor]:
    left, right = Batch(*a), Batch(*b)
    if 0 in (*a.codes.shape, *b.codes.shape):
        return [_bmm_shape(a, b, out_dtype)[0].zero_()]
    if is_usual() and vendor.refuses(left, right) is None:
        ledger.count("grouped_bmm", a.codes.shape[0])
        return [vendor.grouped_bmm(left, right, fast).to(out_dtype)]
    pairs = zip(left.matrices(), right.matrices(), strict=True)
    return [torch.stack([gemm(x, y, out_dtype, "fast" if fast else "slow") for x, y in pairs])]


def _bmm_shape(a: Quantized, b: Quantized, out_dtype: torch.dtype, *_: bool) -> list[Tensor]:
    return [a.scale.new_empty(a.codes.shape[0], a.codes.shape[1], b.codes.shape[1], dtype=out_dtype)]


define_packed("bmm", _bmm, _bmm_shape, torch.Tag.needs_fixed_stride_order)
