"""Transposes of bytes in Triton, in the form that `kernels/triton/codes.py` uses: 32-bit words.

On an H200 with Triton 3.6, `tl.trans` of an FP8 or uint8 tile of 128 x 128, beside other stores, has given wrong
bytes, and so has a maximum that hands NaN on, beside transposed FP8 stores. Versions differ.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

WARPS = [4, 8]
SIDES = [64, 128]


@triton.jit
def _row_of_quarters(codes_ptr, lying_ptr, rows, cols, total):
    where = rows[:, None] * total + cols[None, :]
    codes = tl.load(codes_ptr + where)
    tl.store(lying_ptr + where, codes)
    return codes.to(tl.uint32)


@triton.jit
def _words_kernel(codes_ptr, lying_ptr, turned_ptr, total, SIDE: tl.constexpr):
    """One tile of bytes: as it lies, and transposed in words of four bytes that stand one under the other."""
    quarter = tl.program_id(0) * (SIDE // 4) + tl.arange(0, SIDE // 4)
    cols = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    words = _row_of_quarters(codes_ptr, lying_ptr, 4 * quarter, cols, total)
    words |= _row_of_quarters(codes_ptr, lying_ptr, 4 * quarter + 1, cols, total) << 8
    words |= _row_of_quarters(codes_ptr, lying_ptr, 4 * quarter + 2, cols, total) << 16
    words |= _row_of_quarters(codes_ptr, lying_ptr, 4 * quarter + 3, cols, total) << 24
    where = cols[:, None] * (total // 4) + quarter[None, :]
    tl.store(turned_ptr.to(tl.pointer_type(tl.uint32)) + where, tl.trans(words))


def operands(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (256, 256), each a finite number and none -0, and memory for them as they lie and transposed."""
    codes = torch.randint(0, 255, (256, 256), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    codes[codes == 0x80] = 2
    return codes.to(device), *(torch.zeros(256, 256, dtype=torch.uint8, device=device) for _ in range(2))


def wrong(codes: torch.Tensor, lying: torch.Tensor, turned: torch.Tensor) -> int:
    """How many of the bytes are not those of the codes."""
    return int((lying != codes).sum() + (turned != codes.t()).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("side", SIDES)
def test_transposed_words_are_right(side, warps, device):
    codes, lying, turned = operands(device)
    _words_kernel[(256 // side, 256 // side)](codes, lying, turned, 256, SIDE=side, num_warps=warps)
    assert wrong(codes, lying, turned) == 0
