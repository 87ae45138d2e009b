"""The batched GEMM contract: many products of one shape per call, and kernel selection.

    bmm(a, b) = a_i . b_i^T for each i         a (B, M, K), b (B, N, K): FP8 codes; result (B, M, N), in `out_dtype`

Every matrix of a batch has its own scales. By definition a loop over `gemm`; a GPU with a batched kernel for these
scales runs one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.batch import Batch
from octavo.kernels.gemm import gemm
from octavo.kernels.grouped import ALIGNED
from octavo.kernels.runtime import host_state, ledger
from octavo.kernels.runtime.dispatch import architecture, implementation, launches_on, triton_unsupported_reason
from octavo.kernels.runtime.operation import operation
from octavo.numerics import PER_ROW, PER_TENSOR, Granularity, granularity_named


def batched_unsupported_reason(device: torch.device, a: tuple[str, str], b: tuple[str, str]) -> str | None:
    """Return why a device has no batched kernel for two (format, granularity) operands, or None."""
    names = ["tensor" if granularity == "column" else granularity for _, granularity in (a, b)]  # folded: one scale
    return _unsupported_kind(device, (a[0], b[0]), tuple(granularity_named(name) for name in names))


def _unsupported_kind(device: torch.device, formats: Sequence[str], granularities: Sequence[Granularity]) -> str | None:
    if device.type != "cuda":
        return f"no grouped FP8 GEMM for {device.type}"
    if not set(granularities) <= {PER_TENSOR, PER_ROW}:
        return "the grouped FP8 GEMM takes row scales only"
    if "e5m2" in formats:
        return "the grouped FP8 GEMM takes E4M3 only"
    arch = architecture(device)
    reason = None if arch.grouped else f"the grouped FP8 GEMM is Hopper's, this is {arch.name}"
    return reason or triton_unsupported_reason(device)


def _unsupported_reason(a: Batch, b: Batch) -> str | None:
    """Return why the grouped GEMM cannot take these operands, (B, M, K) and (B, N, K), or None."""
    formats = ["e4m3" if x.codes.dtype == torch.float8_e4m3fn else "e5m2" for x in (a, b)]
    reason = _unsupported_kind(a.codes.device, formats, (a.granularity, b.granularity))
    if reason is None and (a.codes.shape[2] % ALIGNED or b.codes.shape[1] % ALIGNED):
        reason = f"N = {b.codes.shape[1]} or K = {a.codes.shape[2]} is not a multiple of {ALIGNED}"
    return reason


def _grouped(a: Batch, b: Batch, out_dtype: torch.dtype, fast: bool) -> Tensor:
    """Compute all products in one grouped GEMM, each matrix of the batch a group of rows."""
    batch, rows, _ = a.codes.shape
    ends = torch.arange(rows, (batch + 1) * rows, rows, dtype=torch.int32, device=a.codes.device)
    with launches_on(a.codes.device):
        y: Tensor = implementation("triton", "grouped_gemm").grouped_gemm(
            a.codes.flatten(0, 1), _row_scale(a).flatten(), b.codes.contiguous(), _row_scale(b), ends, out_dtype, fast
        )
    return y.view(batch, rows, -1).detach()  # autograd forbids in-place writes to a view from an autograd function


def _row_scale(x: Batch) -> Tensor:
    """Return one scale per row, (B, rows), contiguous; a per-matrix scale is broadcast over the rows."""
    batch, rows = x.codes.shape[:2]
    return x.scale.expand(batch, rows, 1).reshape(batch, rows).contiguous()


def _fake(a: Batch, b: Batch, out_dtype: torch.dtype, _accumulate: str) -> Tensor:
    return a.scale.new_empty(a.codes.shape[0], a.codes.shape[1], b.codes.shape[1], dtype=out_dtype)


@operation(fake=_fake, tags=[torch.Tag.needs_fixed_stride_order])
def bmm(a: Batch, b: Batch, out_dtype: torch.dtype, accumulate: str = "slow") -> Tensor:
    """Return a_i . b_i^T for each i, (B, M, N). Any extent may be 0.

    Args:
        a: (B, M, K).
        b: (B, N, K).
        out_dtype: BF16, FP16 or FP32.
        accumulate: `slow` or `fast`, as for `gemm`.

    Raises:
        ConfigError: mismatched shapes.
    """
    if a.codes.shape[::2] != b.codes.shape[::2]:
        raise ConfigError(
            f"bmm takes (B, M, K) and (B, N, K), got shapes {tuple(a.codes.shape)} and {tuple(b.codes.shape)}."
        )
    if 0 in (*a.codes.shape, *b.codes.shape):
        return _fake(a, b, out_dtype, accumulate).zero_()
    if not host_state.now.accumulator and _unsupported_reason(a, b) is None:
        ledger.count("grouped_bmm", a.codes.shape[0])
        return _grouped(a, b, out_dtype, accumulate == "fast")
    pairs = zip(a.matrices(), b.matrices(), strict=True)
    return torch.stack([gemm(x, y, out_dtype, accumulate) for x, y in pairs])
