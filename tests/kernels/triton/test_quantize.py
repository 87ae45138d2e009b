"""The Triton quantiser gives the specification's codes and scales, bit for bit."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import empty_scale
from octavo.kernels.quantize import reference
from octavo.numerics import Quantized

triton_quantize = pytest.importorskip("octavo.kernels.quantize.triton")
output = pytest.importorskip("octavo.kernels.triton.output")
shape = pytest.importorskip("octavo.kernels.triton.shape")

GRANULARITIES = ["tensor", "row", "column", "1x128", "128x1", "128x128"]
ROW = QuantSpec("e4m3", "row", "power_of_two")


def same(one: Quantized, other: Quantized) -> bool:
    codes = [q.codes.contiguous().view(torch.uint8) for q in (one, other)]
    return torch.equal(*codes) and torch.equal(one.scale, other.scale) and one.granularity == other.granularity


def power_of_two(*shape: int, device: str) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape).float()).to(device)


def hard(rows: int, cols: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal data with what breaks kernels: NaN, infinities, zero rows, tiny rows, values that saturate nothing."""
    x = torch.randn(rows, cols)
    x[3, 5], x[7, 9], x[8, 1] = float("nan"), float("inf"), -float("inf")
    x[9], x[:, 11], x[20], x[21] = 0, 0, x[20] * 1e-30, x[21] * 1e30
    return x.to(dtype).to(device)


@pytest.mark.covering(1)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scaling", ["power_of_two", "float32", "engine"])
def test_codes_and_scales_are_the_specifications(format, granularity, scaling, device):
    x, target = hard(130, 140, device), QuantSpec(format, granularity, scaling)
    (expected, expected_t) = reference.quantize_pair([x], target, target)
    rows, _ = triton_quantize.quantize_pair([x], target, None)
    _, columns = triton_quantize.quantize_pair([x], None, target)
    both = triton_quantize.quantize_pair([x], target, target)
    assert same(rows, expected) and same(both[0], expected)
    assert same(columns, expected_t) and same(both[1], expected_t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_input_types(dtype, device):
    x = torch.randn(70, 90, dtype=dtype, device=device)
    expected = reference.quantize_pair([x], ROW, ROW)
    for got, want in zip(triton_quantize.quantize_pair([x], ROW, ROW), expected, strict=True):
        assert same(got, want)


@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128"])
def test_folds_and_several_sources(granularity, device):
    sources = [torch.randn(130, width, device=device).bfloat16() for width in (128, 44, 60)]
    target = QuantSpec("e4m3", granularity, "power_of_two")
    folds = power_of_two(1, 232, device=device), power_of_two(130, 1, device=device)
    expected = reference.quantize_pair(sources, target, target, *folds)
    for got, want in zip(triton_quantize.quantize_pair(sources, target, target, *folds), expected, strict=True):
        assert same(got, want)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", range(4))
@pytest.mark.parametrize("further", [1, 2, 3, 0])
def test_the_two_sides_may_differ_in_format_and_in_how_scales_are_found(rows, further, device):
    x = hard(130, 260, device)
    names = ("row", "tensor", "1x128", "128x128")
    targets = QuantSpec("e4m3", names[rows], "power_of_two"), QuantSpec("e5m2", names[(rows + further) % 4], "float32")
    expected = reference.quantize_pair([x], *targets)
    for got, want in zip(triton_quantize.quantize_pair([x], *targets), expected, strict=True):
        assert same(got, want)


def test_one_side_may_have_many_more_scales_than_the_other(device):
    x, targets = hard(1030, 12, device), (ROW, QuantSpec("e4m3", "tensor", "power_of_two"))
    for pair in (targets, targets[::-1]):
        for got, want in zip(
            triton_quantize.quantize_pair([x], *pair), reference.quantize_pair([x], *pair), strict=True
        ):
            assert same(got, want)


@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
def test_a_tile_past_the_last_row_writes_no_scales(granularity, device, monkeypatch):
    monkeypatch.setattr(triton_quantize, "HIGH", shape.Shape(128, 128, warps=4, steps=3))
    rooms = []

    def with_room(*arguments) -> Tensor:
        scale = empty_scale(*arguments)
        rooms.append(torch.full((scale.numel() + 1024,), -1.0, device=device))
        return rooms[-1].as_strided(scale.size(), scale.stride())

    monkeypatch.setattr(output, "empty_scale", with_room)
    x, target = torch.randn(130, 200, device=device).bfloat16(), QuantSpec("e4m3", granularity, "power_of_two")
    expected = reference.quantize_pair([x], target, target)
    for got, want in zip(triton_quantize.quantize_pair([x], target, target), expected, strict=True):
        assert same(got, want)
    assert all(bool((room[-1024:] == -1).all()) for room in rooms)


def test_a_source_with_rows_apart_and_one_with_columns_apart(device):
    wide = torch.randn(40, 100, device=device).bfloat16()
    for x in (wide[:, 10:70], wide.t()):
        got = triton_quantize.quantize_pair([x], ROW, ROW)
        for one, other in zip(got, reference.quantize_pair([x], ROW, ROW), strict=True):
            assert same(one, other)


def test_every_bf16_value_of_a_binade_rounds_as_it_should(device):
    # All mantissas over nine binades, both signs: normal and subnormal codes, ties, the largest value and beyond.
    bits = torch.arange(0x3C00, 0x4080, dtype=torch.int32)
    x = (bits << 16).view(torch.float32).reshape(-1, 128)
    x = torch.cat([x, -x]).to(device)
    target = QuantSpec("e4m3", "tensor", "power_of_two")
    assert same(triton_quantize.quantize_pair([x], target, None)[0], reference.quantize_pair([x], target, None)[0])


def test_what_no_kernel_has_is_refused():
    assert triton_quantize.unsupported_reason(ROW, None) is None
    assert "1x32" in triton_quantize.unsupported_reason(QuantSpec("e4m3", "1x32", "power_of_two"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize(("cols", "rotation"), [(256, 256), (192, 256), (200, 16), (300, 0), (512, -256), (192, -256)])
def test_rotated_and_integer_rows_are_the_specifications(cols, rotation, format, device):
    x = hard(24, cols, device)
    for scaling in ("float32", "power_of_two"):
        target = QuantSpec(format, "row", scaling, "nearest", rotation)
        expected, _ = reference.quantize_pair([x], target, None)
        got, _ = triton_quantize.quantize_pair([x], target, None)
        assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        torch.testing.assert_close(got.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
        parts, _ = triton_quantize.quantize_pair([x[:, :100], x[:, 100:]], target, None)
        assert torch.equal(parts.codes.view(torch.uint8), expected.codes.view(torch.uint8))


def test_what_needs_whole_rows_is_refused_elsewhere():
    rotated = QuantSpec("int8", "row", "float32", "nearest", 256)
    assert triton_quantize.unsupported_reason(rotated, None, cols=32768) is None
    assert "more than 32768" in triton_quantize.unsupported_reason(rotated, None, cols=32769)
    for targets in ((rotated, ROW), (None, rotated._replace(granularity="tensor"))):
        assert "without those of the transpose" in triton_quantize.unsupported_reason(*targets)
