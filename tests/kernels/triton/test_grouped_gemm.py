"""Triton's grouped GEMMs against the loop over experts, bit for bit: sums of small whole numbers are exact anywhere."""

import pytest
import torch

from octavo.kernels.grouped.padding import padded_length
from octavo.kernels.grouped_gemm import reference
from octavo.kernels.grouped_gemm import triton as fast

pytestmark = pytest.mark.usefixtures("loops_with_bounds")


def codes(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(-4, 5, shape, device=device).float().to(torch.float8_e4m3fn)


def scales(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(-3, 4, shape, device=device).float().exp2()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("counts", "rows", "cols"), [([5], 16, 48), ([130, 0, 3], 144, 272), ([0, 7, 1, 0], 32, 16)])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_times_the_weight_of_their_group(counts, rows, cols, strided, device):
    ends, total = torch.tensor(counts, device=device).cumsum(0).int(), sum(counts)
    a, a_scale = codes(total, cols, device=device), scales(total, 1, device=device)
    b, b_scale = codes(len(counts), rows, cols, device=device), scales(len(counts), rows, device=device)
    if strided:  # as a transpose of the stack of all weights lies
        b = b.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(torch.float8_e4m3fn)
    for scale, dtype, is_fast in (
        (b_scale, torch.float32, False),
        (None, torch.float32, True),
        (b_scale, torch.bfloat16, False),
    ):
        arguments = a, a_scale, b, scale, ends, dtype, is_fast
        assert torch.equal(fast.grouped_gemm(*arguments), reference.grouped_gemm(*arguments))


@pytest.mark.parametrize(
    ("counts", "rows", "cols"),
    [
        ([130, 0, 3], 144, 272),
        pytest.param([0, 1, 0, 1000, 129, 0], 768, 2048, marks=pytest.mark.gpu),
        pytest.param([4096], 2048, 20_000, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_integer_sums_are_exact(counts, rows, cols, device):
    ends, total = torch.tensor(counts, device=device).cumsum(0).int(), sum(counts)
    a, b = (torch.randint(-127, 128, (n, cols), dtype=torch.int8, device=device) for n in (total, len(counts) * rows))
    a_scale, b_scale = torch.rand(total, 1, device=device), torch.rand(len(counts), rows, device=device)
    a_scale[-1] = torch.nan  # of a row with a value that is not finite
    for dtype in (torch.bfloat16, torch.float32):
        arguments = a, a_scale, b.view(len(counts), rows, cols), b_scale, ends, dtype, False
        y = fast.grouped_gemm(*arguments)
        exact = torch.cat([
            (part.double() @ w.double().t()).float() * s * t
            for part, s, w, t in zip(
                a.cpu().split(counts), a_scale.cpu().split(counts), b.cpu().split(rows), b_scale.cpu(), strict=True
            )
        ]).to(dtype)  # fmt: skip
        assert torch.equal(y.cpu().nan_to_num(7.0), exact.nan_to_num(7.0)) and y[-1].isnan().all()
        assert torch.equal(reference.grouped_gemm(*arguments).nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize(("counts", "rows", "cols"), [([5], 16, 48), ([130, 0, 3], 144, 272)])
def test_sums_over_the_tokens_of_each_group(counts, rows, cols, device):
    ends, experts = torch.tensor(counts, device=device).cumsum(0).int(), len(counts)
    wide = padded_length(sum(counts), experts)
    a, b = codes(rows, wide, device=device), codes(cols, wide, device=device)
    a_scale, b_scale = scales(experts, rows, device=device), scales(experts, cols, device=device)
    for scale in (b_scale, None):
        arguments = a, a_scale, b, scale, ends, torch.float32
        assert torch.equal(fast.grouped_wgrad(*arguments), reference.grouped_wgrad(*arguments))
