"""Counts of what quantising loses, against lists written by hand."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec
from octavo.kernels.telemetry import Counts, count, new_stats, quantize_counted, read
from octavo.numerics import PER_ROW, PER_TENSOR, Quantized
from octavo.numerics.quantize import to_codes

TENSOR = QuantSpec("e4m3", "tensor", "power_of_two")


def with_scale(x: torch.Tensor, scale: float, fmt: str) -> Quantized:
    """Codes by a scale that is not of x: only so can a value be past the largest code."""
    target = TENSOR._replace(format=fmt)
    return Quantized(to_codes(x / scale, target.fmt), torch.full((1, 1), scale), PER_TENSOR)


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize(
    ("fmt", "tiny", "cut"), [("e4m3", 2.0**-10, 464.0), ("e5m2", 2.0**-17, 61440.0)], ids=["e4m3", "e5m2"]
)
def test_each_kind_at_its_bounds(fmt, tiny, cut, scale):
    above = 1 + 2.0**-20
    flushed = [tiny, -tiny, tiny / 2, -1e-20]
    saturated = [cut * above, -cut * above, 10 * cut]
    neither = [0.0, -0.0, tiny * above, -tiny * above, 1.0, cut, -cut]
    broken = [float("nan"), float("inf"), -float("inf"), float("nan"), float("nan")]
    x = torch.tensor([flushed + saturated + neither + broken]) * scale
    assert read(count(x, with_scale(x, scale, fmt))) == Counts(10 * cut * scale, 4, 3, 5)


def test_amax_is_that_of_finite_values_and_zero_where_there_are_none():
    x = torch.tensor([[3.0, -7.5, float("inf")], [float("nan"), 0.0, 1.0]])
    assert read(count(x, kernels.quantize(x, "e4m3", "row"))).amax == 7.5
    x = torch.full((2, 3), float("nan"))
    assert read(count(x, kernels.quantize(x, "e4m3", "row"))) == Counts(0.0, 0, 0, 6)


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", "1x128", "128x128", "1x32"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_scale_of_ones_own_saturates_nothing_and_flushes_what_is_too_small_for_its_tile(granularity, fmt):
    x = torch.randn(70, 300) * torch.exp2(torch.randint(-30, 3, (70, 300)).float())
    quantized = kernels.quantize(x, fmt, granularity)
    found = read(count(x, quantized))
    flushed = int((quantized.codes.float() == 0).sum())
    assert found == Counts(float(x.abs().max()), flushed, 0, 0) and flushed > 100


def test_counts_add_up_and_the_codes_are_those_of_quantize():
    stats = new_stats("cpu")
    first, second = torch.tensor([[2.0, float("inf"), 1e-9]]), torch.tensor([[-4.0, 1.0, 1e-9]]).bfloat16()
    for x in (first, second):
        quantized, expected = quantize_counted(x, TENSOR, stats), kernels.quantize(x, *TENSOR[:3])
        assert torch.equal(quantized.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(quantized.scale, expected.scale)
    assert read(stats) == Counts(4.0, 2, 0, 1)
    quantize_counted(first, TENSOR, stats)
    assert read(stats) == Counts(4.0, 3, 0, 2)


def test_a_matrix_without_elements_counts_nothing():
    stats = new_stats("cpu")
    assert quantize_counted(torch.zeros(0, 5), QuantSpec("e4m3", "row", "float32"), stats).granularity == PER_ROW
    assert read(stats) == Counts(0.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("x", "target", "stats", "message"),
    [
        (torch.zeros(2, 2, 2), TENSOR, new_stats("cpu"), "a matrix"),
        (torch.zeros(2, 2), TENSOR._replace(rounding="stochastic"), new_stats("cpu"), "stochastic"),
        (torch.zeros(2, 2), TENSOR, torch.zeros(4), "new_stats"),
        (torch.zeros(2, 2), TENSOR, new_stats("cpu")[:3], "new_stats"),
        (torch.zeros(2, 2), TENSOR, new_stats("meta"), "new_stats"),
    ],
)
def test_what_cannot_be_counted_is_said(x, target, stats, message):
    with pytest.raises(ConfigError, match=message):
        quantize_counted(x, target, stats)


def test_compiled_code_is_refused(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match="eager mode only"):
        quantize_counted(torch.ones(3, 4), TENSOR, new_stats("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128"])
def test_a_gpu_counts_the_same_without_a_fallback(granularity):
    target, stats = QuantSpec("e4m3", granularity, "power_of_two"), new_stats("cuda")
    x = (
        torch.randn(3000, 4096, device="cuda") * torch.exp2(torch.randint(-30, 3, (3000, 1), device="cuda"))
    ).bfloat16()
    x[7, ::3] = float("nan")
    with kernels.record() as ledger:
        quantized = quantize_counted(x, target, stats)
    assert not ledger.fallbacks
    assert read(stats) == read(count(x, quantized))
    expected = kernels.quantize(x, *target[:3])
    assert torch.equal(quantized.codes.view(torch.uint8), expected.codes.view(torch.uint8))
