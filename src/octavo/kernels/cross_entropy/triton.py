"""Cross-entropy over rows of any length: one pass finds the largest logit and the sum, a second writes the gradient.

The first pass keeps a running maximum and sum per `AT_ONCE` neighbours, and reduces them only at the end of the row:
so it waits for memory alone. The second runs in reverse order: the last reads of the first are still cached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.cast import to_dtype
from octavo.kernels.triton.codes import INTERPRETED
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.shape import next_power_of_2

AT_ONCE: tl.constexpr = tl.constexpr(8)
"""Neighbours that a thread loads in one instruction."""


class Walk(NamedTuple):
    """Launch shape of a row: elements per block, warps, and pipeline stages of the loads."""

    block: int
    warps: int
    stages: int = 1

    def meta(self, vocab: int) -> dict[str, Any]:
        """Return the meta-parameters for a row of `vocab` elements."""
        block = min(max(next_power_of_2(vocab), AT_ONCE.value), self.block)
        warps = max(min(self.warps, block // 256), 1)
        return {"VOCAB": vocab, "BLOCK": block, "STAGES": self.stages, "num_warps": warps}


WALK = Walk(16384, warps=32)


def cross_entropy_(
    logits_MV: Tensor, targets_M: Tensor, ignore_index: int, gradient: bool, softcap: float, z_loss: float
) -> Tensor:
    """See `octavo.kernels.cross_entropy.cross_entropy_`."""
    rows, vocab = logits_MV.shape
    loss_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    _kernel[(rows,)](
        logits_MV, logits_MV.stride(0), targets_M.contiguous(), loss_M, ignore_index, softcap, z_loss,
        GRADIENT=gradient, CAPPED=softcap > 0, **WALK.meta(vocab),
    )  # fmt: skip
    return loss_M


@triton.jit
def _exp(x):
    """exp in two instructions; subnormal results flush to 0."""
    if INTERPRETED:
        result = tl.exp(x)
    else:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _capped(logits, softcap):
    """Softcap * tanh(logits / softcap), with tanh(a) = 1 - 2 / (1 + exp(2 a)), which overflows to the right limits."""
    return softcap * (1 - 2 / (1 + tl.exp(2 / softcap * logits)))


@triton.jit
def _columns(start, BLOCK: tl.constexpr):
    """The columns of a block, (BLOCK / AT_ONCE, AT_ONCE)."""
    # Constants stand on the right: newer interpreters of Triton treat an expression that begins with one as constant.
    return tl.arange(0, BLOCK // AT_ONCE)[:, None] * AT_ONCE + tl.arange(0, AT_ONCE)[None, :] + start


@triton.jit
def _load(
    row_ptr, columns, softcap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr
):
    """Load FP32 logits, capped; -inf past the end of the row. WHOLE: none is past it. KEEP: cache for a reread."""
    if WHOLE:
        z = tl.load(row_ptr + columns, eviction_policy="evict_last" if KEEP else "evict_first").to(tl.float32)
    else:
        z = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
    if CAPPED:
        z = _capped(z, softcap)
        if not WHOLE:
            z = tl.where(columns < VOCAB, z, float("-inf"))
    return z


@triton.jit
def _add(z, largest, total):
    """Update the running maxima and sums of exp(z - largest), one each per AT_ONCE neighbours."""
    new = tl.maximum(largest, tl.max(z, axis=1))
    return new, total * _exp(largest - new) + tl.sum(_exp(z - new[:, None]), axis=1)


@triton.jit
def _log_sum_exp(
    row_ptr, softcap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """(base, total): log(sum(exp(z))) is base + log(total). In their sum, a large base would round away log(total)."""
    # The lowest finite number: -inf minus itself would be NaN.
    largest = tl.full((BLOCK // AT_ONCE,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK // AT_ONCE,), tl.float32)
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK
    for start in tl.range(0, WHOLE, BLOCK, num_stages=STAGES):
        z = _load(row_ptr, _columns(start, BLOCK), softcap, VOCAB, CAPPED, True, True)
        largest, total = _add(z, largest, total)
    if WHOLE < VOCAB:
        z = _load(row_ptr, _columns(WHOLE, BLOCK), softcap, VOCAB, CAPPED, False, True)
        largest, total = _add(z, largest, total)
    base = tl.max(largest, axis=0)
    return base, tl.sum(total * _exp(largest - base), axis=0)


@triton.jit
def _write_gradient(
    row_ptr, columns, target, base, weight, softcap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr
):
    """Overwrite a block of logits with their gradient. weight: factor of exp(z - base)."""
    z = _load(row_ptr, columns, softcap, VOCAB, CAPPED, WHOLE, False)
    d = _exp(z - base) * weight
    d = tl.where(columns == target, d - 1, d)
    if CAPPED:
        d = d * (1 - (z / softcap) * (z / softcap))
    d = to_dtype(d, row_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(row_ptr + columns, d, eviction_policy="evict_first")
    else:
        tl.store(row_ptr + columns, d, mask=columns < VOCAB)


@Kernel
@triton.jit
def _kernel(
    logits_ptr, stride, targets_ptr, loss_ptr, ignore_index, softcap, z_loss,
    GRADIENT: tl.constexpr, CAPPED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    WHOLE: tl.constexpr = VOCAB // BLOCK * BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, VOCAB, BLOCK):
                columns = _columns(start, BLOCK)
                tl.store(row_ptr + columns, tl.zeros(columns.shape, row_ptr.dtype.element_ty), mask=columns < VOCAB)
    else:
        valid = (target >= 0) & (target < VOCAB)
        target_logit = tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32)  # before the row is overwritten
        if CAPPED:
            target_logit = _capped(target_logit, softcap)
        base, total = _log_sum_exp(row_ptr, softcap, VOCAB, CAPPED, BLOCK, STAGES)
        total = tl.where(valid, total, float("nan"))
        log_total = tl.log(total)
        lse = base + log_total
        tl.store(loss_ptr + row, log_total - (target_logit - base) + z_loss * lse * lse)
        if GRADIENT:
            weight = (1 + 2 * z_loss * lse) / total
            column = target.to(tl.int32)
            if WHOLE < VOCAB:
                _write_gradient(row_ptr, _columns(WHOLE, BLOCK), column, base, weight, softcap, VOCAB, CAPPED, False)
            for back in tl.range(BLOCK, WHOLE + BLOCK, BLOCK, num_stages=STAGES):
                columns = _columns(WHOLE - back, BLOCK)
                _write_gradient(row_ptr, columns, column, base, weight, softcap, VOCAB, CAPPED, True)
