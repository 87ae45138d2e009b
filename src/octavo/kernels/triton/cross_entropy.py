"""Cross-entropy over rows of any length: one read finds the largest logit and the sum, a second writes the gradient.

The second pass walks backwards: what the first one read last is still in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.cast import to_dtype

LONGEST_BLOCK = 16384
"""Elements of a row that a program works on at a time."""


def cross_entropy_(
    logits_MV: Tensor, targets_M: Tensor, ignore_index: int, gradient: bool, softcap: float, z_loss: float
) -> Tensor:
    """See `octavo.kernels.cross_entropy.cross_entropy_`."""
    rows, vocab = logits_MV.shape
    loss_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    block = min(triton.next_power_of_2(vocab), LONGEST_BLOCK)
    _kernel[(rows,)](
        logits_MV, logits_MV.stride(0), targets_M.contiguous(), loss_M, ignore_index, softcap, z_loss,
        VOCAB=vocab, GRADIENT=gradient, CAPPED=softcap > 0, BLOCK=block, num_warps=min(max(block // 512, 1), 32),
    )  # fmt: skip
    return loss_M


@triton.jit
def _capped(logits, softcap):
    """Softcap * tanh(logits / softcap), with tanh(a) = 1 - 2 / (1 + exp(2 a)), which overflows to the right limits."""
    return softcap * (1 - 2 / (1 + tl.exp(2 / softcap * logits)))


@triton.jit
def _load(row_ptr, columns, softcap, VOCAB: tl.constexpr, CAPPED: tl.constexpr):
    """Logits in FP32, capped; -inf past the end of the row."""
    inside = columns < VOCAB
    z = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        z = _capped(z, softcap)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _log_sum_exp(row_ptr, softcap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """(base, rest): their sum is log(sum(exp(z))). Apart, a large base does not round away the rest."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    base = tl.full((), 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        z = _load(row_ptr, start + tl.arange(0, BLOCK), softcap, VOCAB, CAPPED)
        new = tl.maximum(largest, tl.max(z, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be NaN
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(z - base), axis=0)
        largest = new
    return base, tl.log(total)


@triton.jit
def _kernel(
    logits_ptr, stride, targets_ptr, loss_ptr, ignore_index, softcap, z_loss,
    VOCAB: tl.constexpr, GRADIENT: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, VOCAB, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(row_ptr + columns, tl.zeros((BLOCK,), row_ptr.dtype.element_ty), mask=columns < VOCAB)
    else:
        valid = (target >= 0) & (target < VOCAB)
        right = tl.load(row_ptr + target, mask=valid, other=0.0).to(tl.float32)  # before the row is overwritten
        if CAPPED:
            right = _capped(right, softcap)
        base, rest = _log_sum_exp(row_ptr, softcap, VOCAB, CAPPED, BLOCK)
        rest = tl.where(valid, rest, float("nan"))
        lse = base + rest
        tl.store(loss_ptr + row, rest - (right - base) + z_loss * lse * lse)
        if GRADIENT:
            BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
            for number in range(BLOCKS):
                columns = (BLOCKS - 1 - number) * BLOCK + tl.arange(0, BLOCK)
                z = _load(row_ptr, columns, softcap, VOCAB, CAPPED)
                d = tl.exp(z - base - rest) * (1 + 2 * z_loss * lse)
                d = tl.where(columns == target, d - 1, d)
                if CAPPED:
                    d = d * (1 - (z / softcap) * (z / softcap))
                tl.store(row_ptr + columns, to_dtype(d, row_ptr.dtype.element_ty), mask=columns < VOCAB)
