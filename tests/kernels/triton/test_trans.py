"""What Triton itself does with transposes of bytes: the fault that `kernels/triton/codes.py` is written around.

On an H200 with Triton 3.6, `tl.trans` of an FP8 or uint8 tile of 128 x 128, beside other stores, has given wrong
bytes, and so has a maximum that hands NaN on, beside transposed FP8 stores. Versions differ. So what the raw forms give
is recorded, as properties of the test report; the form that the kernels use, 32-bit words, must be right.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

WARPS = [4, 8]
SIDES = [64, 128]


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _raw_kernel(x_ptr, lying_ptr, turned_ptr, total, FORM: tl.constexpr, WITH_MAX: tl.constexpr, SIDE: tl.constexpr):
    """One tile of FP32 as FP8 codes: as it lies, and transposed as FORM says."""
    rows = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    cols = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    x = tl.load(x_ptr + rows[:, None] * total + cols[None, :])
    if WITH_MAX:  # finite data has a finite maximum: it changes nothing, and must be waited for
        largest = tl.reduce(tl.reduce(tl.abs(x), 1, _larger_or_nan), 0, _larger_or_nan)
        x *= tl.where(largest >= 0.0, 1.0, 2.0)
    codes = x.to(tl.float8e4nv)
    tl.store(lying_ptr + rows[:, None] * total + cols[None, :], codes)
    where = cols[:, None] * total + rows[None, :]
    if FORM == "fp8":
        tl.store(turned_ptr + where, tl.trans(codes))
    elif FORM == "uint8":
        turned = tl.trans(codes.to(tl.uint8, bitcast=True))
        tl.store(turned_ptr.to(tl.pointer_type(tl.uint8)) + where, turned)
    else:
        tl.static_assert(FORM == "fp32")
        tl.store(turned_ptr + where, tl.trans(x).to(tl.float8e4nv))


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
@pytest.mark.parametrize("with_max", [False, True], ids=["", "beside a maximum"])
@pytest.mark.parametrize("form", ["uint8", "fp8", "fp32"])
def test_what_a_raw_transpose_gives_is_recorded(form, with_max, side, warps, device, record_property):
    codes, lying, turned = operands(device)
    x = codes.view(torch.float8_e4m3fn).float()
    memory = (memory.view(torch.float8_e4m3fn) for memory in (lying, turned))
    grid = 256 // side, 256 // side
    try:
        _raw_kernel[grid](x, *memory, 256, FORM=form, WITH_MAX=with_max, SIDE=side, num_warps=warps)
        found = f"{wrong(codes, lying, turned)} of {2 * codes.numel()} bytes wrong"
    except Exception as error:  # a version that does not compile it
        found = f"{type(error).__name__}: {error}"
    what = f"tl.trans of {form}, {side} x {side}, {warps} warps{', beside a maximum' if with_max else ''}"
    record_property(f"triton {triton.__version__}: {what}", found)
    print(f"triton {triton.__version__}: {what}: {found}")


@pytest.mark.gpu
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("side", SIDES)
def test_transposed_words_are_right(side, warps, device):
    codes, lying, turned = operands(device)
    _words_kernel[(256 // side, 256 // side)](codes, lying, turned, 256, SIDE=side, num_warps=warps)
    assert wrong(codes, lying, turned) == 0
