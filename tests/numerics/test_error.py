"""Error measures against figures worked out by hand."""

import math

import pytest
import torch

from octavo.numerics import (
    E4M3,
    E5M2,
    PER_ROW,
    PER_TENSOR,
    Quantized,
    cosine_of,
    inner_products,
    kurtosis,
    measure,
    quantize,
    sqnr_db,
    sqnr_per_row_db,
)


def test_sqnr_of_known_noise():
    # signal 3^2 + 4^2 = 25, noise 0.5^2 = 0.25: a ratio of 100 is 20 dB
    assert sqnr_db(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])) == pytest.approx(20.0, abs=1e-12)


def test_sqnr_of_equal_tensors_is_infinite():
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf


def test_sqnr_of_nothing_left_is_zero():
    assert sqnr_db(torch.tensor([2.0, -1.0]), torch.zeros(2)) == 0.0


def test_sqnr_per_row_shows_the_row_that_the_global_figure_hides():
    reference = torch.tensor([[1000.0, 0.0], [1.0, 0.0]])
    approximation = torch.tensor([[1001.0, 0.0], [0.0, 0.0]])
    # row 0: 10^6 / 1 = 60 dB; row 1: 1 / 1 = 0 dB; together (10^6 + 1) / 2 = 57 dB
    assert sqnr_per_row_db(reference, approximation).tolist() == pytest.approx([60.0, 0.0], abs=1e-9)
    assert sqnr_db(reference, approximation) == pytest.approx(10 * math.log10((1e6 + 1) / 2), abs=1e-9)


def test_sqnr_does_not_overflow_in_low_precision():
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    assert sqnr_db(x, x * 0.5) == pytest.approx(10 * math.log10(4), abs=1e-6)


def test_kurtosis_of_known_distributions():
    assert kurtosis(torch.tensor([-1.0, 1.0])) == 1.0  # two points: the least there is
    assert kurtosis(torch.tensor([-2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0])) == 4.0  # (2 * 16 / 8) / (2 * 4 / 8)^2
    n = 200_000
    assert abs(kurtosis(torch.randn(n)) - 3.0) < 5 * math.sqrt(24 / n)  # five standard errors of a normal sample


def test_measure_counts_by_hand():
    # amax 448, so scale 1. Of seven finite non-zero values: 0.0005 is under half of 2^-9 and is flushed; 2^-9 and
    # 0.01 (code 5 * 2^-9) are subnormal, under 2^-6; nothing is saturated.
    x = torch.tensor([[448.0, 1.0, 0.0, 0.0005, 2.0**-9, 0.01, 2.0**-6, -3.0]])
    report = measure(x, quantize(x, E4M3, PER_ROW))
    assert report.flushed == 1 / 7
    assert report.subnormal == 2 / 7
    assert report.saturated == 0
    assert report.nonfinite == 0
    noise = 0.0005**2 + (0.01 - 5 * 2.0**-9) ** 2
    signal = float(x.double().square().sum())
    assert report.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)  # 0.01 is not exact in FP32
    assert report.worst_row_sqnr_db == report.sqnr_db


def test_measure_counts_what_a_stale_scale_clamps():
    x = torch.tensor([[448.0, 449.0, -1000.0, 1.0]])
    stale = Quantized(x.clamp(-448, 448).to(E4M3.dtype), torch.ones(1, 1), PER_TENSOR)
    assert measure(x, stale).saturated == 2 / 4


def test_measure_does_not_call_the_scales_own_rounding_saturation():
    torch.manual_seed(3)
    x = torch.randn(400, 64)  # every row's amax is at fmt.max * scale, with an FP32 rounding in between
    assert measure(x, quantize(x, E4M3, PER_ROW, "float32")).saturated == 0


def test_measure_finds_the_worst_row():
    x = torch.ones(3, 4)
    x[1] = torch.tensor([1.0, 2.0**-12, 0.0, 0.0]) * 100  # scaled to 2^-12 * 400 = 0.1: rounded; the others are exact
    report = measure(x, quantize(x, E4M3, PER_TENSOR))
    assert report.worst_row_sqnr_db < math.inf
    assert report.worst_row_sqnr_db == float(sqnr_per_row_db(x[1:2], _restored(x)[1:2]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_rule_3_nan_and_infinities_are_counted(fmt):
    x = torch.tensor([[1.0, torch.nan, torch.inf], [-torch.inf, 2.0, 0.5]])
    report = measure(x, quantize(x, fmt, PER_ROW))
    assert report.nonfinite == 3
    assert report.sqnr_db == math.inf  # the finite values are exact, and only they count
    assert (report.flushed, report.subnormal, report.saturated) == (0, 0, 0)


def test_measure_of_zeros():
    report = measure(torch.zeros(2, 3), quantize(torch.zeros(2, 3)))
    assert (report.sqnr_db, report.flushed, report.subnormal, report.saturated) == (math.inf, 0, 0, 0)


def test_the_cosine_of_a_whole_is_that_of_the_sum_of_its_parts():
    a, b = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 7.0]], dtype=torch.bfloat16)
    parts = torch.stack([inner_products(*rows) for rows in zip(a, b, strict=True)])
    assert parts.tolist() == [[3, 9, 2], [0, 16, 49]] and parts.dtype == torch.float64
    assert cosine_of(parts.sum(0)) == pytest.approx(3 / (25 * 51) ** 0.5, rel=1e-15) and cosine_of(parts[1]) == 0


@pytest.mark.parametrize(("a", "b", "cosine"), [(0.0, 0.0, 1.0), (0.0, 2.0, 0.0), (-1.0, 2.0, -1.0)])
def test_the_cosine_with_zeros(a, b, cosine):
    assert cosine_of(inner_products(torch.tensor([a]), torch.tensor([b]))) == cosine
    assert math.isnan(cosine_of(inner_products(torch.tensor([a]), torch.tensor([math.nan]))))


def _restored(x):
    quantized = quantize(x, E4M3, PER_TENSOR)
    return quantized.codes.double() * quantized.scale.double()
