"""Triton's grouped GEMMs against the loop over experts."""

import pytest
import torch

from octavo.kernels.padding import padded_length
from octavo.kernels.reference import grouped_gemm as reference
from octavo.kernels.triton import grouped_gemm as fast

pytestmark = pytest.mark.usefixtures("loops_with_bounds")


def codes(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("counts", "rows", "cols"), [([5], 16, 48), ([130, 0, 3], 144, 272), ([0, 7, 1, 0], 32, 16)])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_times_the_weight_of_their_group(counts, rows, cols, strided, device):
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    a, a_scale = codes(sum(counts), cols, device=device), torch.rand(sum(counts), 1, device=device)
    b, b_scale = codes(len(counts), rows, cols, device=device), torch.rand(len(counts), rows, device=device)
    if strided:  # as a transpose of the stack of all weights lies
        b = b.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(torch.float8_e4m3fn)
    want = reference.grouped_gemm(a, a_scale, b, b_scale, ends, torch.float32)
    for is_fast in (False, True):
        made = fast.grouped_gemm(a, a_scale, b, b_scale, ends, torch.float32, is_fast)
        torch.testing.assert_close(made, want, rtol=1e-3, atol=2e-3 * float(want.abs().max()))
    ones, b_ones = torch.ones_like(a_scale), torch.ones_like(b_scale)
    plain = [fast.grouped_gemm(a, ones, b, scale, ends, torch.float32, False) for scale in (b_ones, None)]
    assert torch.equal(*plain)
    rounded = fast.grouped_gemm(a, a_scale, b, b_scale, ends, torch.bfloat16, False)
    torch.testing.assert_close(rounded.float(), want, rtol=1e-2, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize(("counts", "rows", "cols"), [([5], 16, 48), ([130, 0, 3], 144, 272)])
def test_sums_over_the_tokens_of_each_group(counts, rows, cols, device):
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    wide = padded_length(sum(counts), len(counts))
    a, b = codes(rows, wide, device=device), codes(cols, wide, device=device)
    a_scale, b_scale = torch.rand(len(counts), rows, device=device), torch.rand(len(counts), cols, device=device)
    arguments = a, a_scale, b, b_scale, ends, torch.float32
    made, want = fast.grouped_wgrad(*arguments), reference.grouped_wgrad(*arguments)
    torch.testing.assert_close(made, want, rtol=1e-3, atol=2e-3 * float(want.abs().max()))
    ones = torch.ones_like(b_scale)
    plain = [fast.grouped_wgrad(a, a_scale, b, scale, ends, torch.float32) for scale in (ones, None)]
    assert torch.equal(*plain)
