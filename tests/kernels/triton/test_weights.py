"""Many weights in one launch: the codes of each are those of the specification."""

import pytest
import torch

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import empty
from octavo.numerics import quantize

triton_quantize = pytest.importorskip("octavo.kernels.quantize.triton")
triton_weights = pytest.importorskip("octavo.kernels.quantize.triton_weights")


@pytest.mark.covering(1)
@pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [96, 130, 33])
def test_a_stack_of_weights(cols, dtype, scaling, device):
    weights = [torch.randn(rows, cols, dtype=dtype, device=device) for rows in (24, 7, 40)]
    weights[1] = torch.randn(7, cols + 3, dtype=dtype, device=device)[:, :cols]  # rows that lie apart
    target = QuantSpec("e4m3", "row", scaling)
    out = empty(target, 71, cols, torch.device(device))
    assert triton_weights.unsupported_reason(weights) is None
    triton_weights.quantize_rows(triton_weights.find_rows(weights), dtype, out, scaling == "power_of_two")
    expected = quantize(torch.cat(weights), target.fmt, target.tile, target.scaling)
    assert torch.equal(out.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(out.scale, expected.scale)


def test_refusals():
    assert "dtype" in triton_weights.unsupported_reason([torch.zeros(2, 2), torch.zeros(2, 2).bfloat16()])
    assert "more than" in triton_weights.unsupported_reason([torch.zeros(1, triton_weights.LONGEST_ROW + 1)])
    assert "not contiguous" in triton_weights.unsupported_reason([torch.zeros(4, 4).t()])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(130,), (128, 128), (256, 128, 24), (24, 7), (128, 128, 128, 5)], ids=str)
@pytest.mark.parametrize("cols", [64, 33])
def test_a_stack_again_from_its_scales(cols, rows, dtype, device):
    weights = [torch.randn(n, cols, dtype=dtype, device=device) * 10.0**i for i, n in enumerate(rows)]
    weights[0][0, 0], weights[-1][-1] = float("inf"), 0.0
    target = QuantSpec("e4m3", "row", "power_of_two")
    expected = quantize(torch.cat(weights), target.fmt, target.tile, target.scaling)
    out = triton_weights.requantize_transposed(weights, expected.scale, target, expected.codes)
    assert out.codes.is_contiguous() and torch.equal(out.codes.view(torch.uint8), expected.codes.view(torch.uint8).t())
    assert torch.equal(out.scale, torch.ones(cols, 1, device=device))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [130, 128])
@pytest.mark.parametrize("cols", [64, 33])
def test_rows_of_a_norm_and_the_same_codes_again_from_its_input(cols, rows, dtype, device):
    x = (torch.randn(rows, cols, device=device) * 2.0 ** torch.randn(rows, 1, device=device)).to(dtype)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    weight = torch.randn(cols, device=device).to(dtype)
    target = QuantSpec("e4m3", "row", "power_of_two")
    normed = x.float() * rstd[:, None] * weight.float()
    expected = quantize(normed, target.fmt, target.tile, target.scaling)
    found, _ = triton_quantize.quantize_normed(x, (rstd, weight), target, None)
    again = triton_weights.requantize_transposed([x], found.scale, target, found.codes, (rstd, weight))
    assert torch.equal(found.scale, expected.scale)
    for codes in (found.codes, again.codes.t()):
        assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))
    contract, _ = kernels.quantize_normed(x, (rstd, weight), target)
    again = kernels.requantize_transposed([x], found.scale, target, found.codes, (rstd, weight))
    for codes in (contract.codes, again.codes.t()):
        assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("keeps_codes", [True, False])
@pytest.mark.parametrize(("count", "rotation"), [(1, 256), (3, 256), (1, -128)])
def test_two_sets_of_codes_from_one_read(count, rotation, keeps_codes, device):
    matrices = [torch.randn(rows, 192, device=device).bfloat16() for rows in (9, 4, 6)[:count]]
    matrices[0][2, 3], matrices[0][4] = torch.nan, 0.0
    first, second = QuantSpec("int8", "row", "float32", "nearest", rotation), QuantSpec("e4m3", "row", "power_of_two")
    codes, others, scale = triton_weights.quantize_rows_of(matrices, first, second, keeps_codes)
    stack = torch.cat(matrices)
    wanted, rows = (quantize(stack, t.fmt, t.tile, t.scaling, rotation=t.rotation) for t in (first, second))
    assert torch.equal(codes.codes, wanted.codes) and torch.equal(scale, rows.scale)
    torch.testing.assert_close(codes.scale, wanted.scale, rtol=0, atol=0, equal_nan=True)
    assert (others is not None) == keeps_codes
    if keeps_codes:
        assert torch.equal(others.view(torch.uint8), rows.codes.view(torch.uint8))


def test_normed_rows_with_the_scales_of_a_second_set(device):
    x, weight = torch.randn(7, 128, device=device).bfloat16(), torch.randn(128, device=device)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    targets = QuantSpec("int8", "row", "float32", "nearest", 64), QuantSpec("e4m3", "row", "power_of_two")
    codes, scale = triton_quantize.quantize_normed(x, (rstd, weight), *targets)
    normed = x.float() * rstd[:, None] * weight
    wanted, rows = (quantize(normed, t.fmt, t.tile, t.scaling, rotation=t.rotation) for t in targets)
    assert torch.equal(codes.codes, wanted.codes) and torch.equal(codes.scale, wanted.scale)
    assert torch.equal(scale, rows.scale)
