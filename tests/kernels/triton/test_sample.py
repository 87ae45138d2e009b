"""Telemetry's sample in Triton against its definition: shares to the bit, moments within FP32's rounding."""

import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import quantize
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.sample import BINS, DETAILED, PHASE, SAMPLED, STATS, WIDTH, SampleInput, reference
from octavo.kernels.sample import triton as fast
from octavo.numerics import dequantize

EXACT = [STATS.index(name) for name in ("amax", "scale", "flushed", "subnormal", "saturated", "nonfinite")]
SQNR = STATS.index("sqnr")
MOMENTS = [STATS.index(name) for name in ("mean", "variance", "kurtosis")]


def new_row(phase, device, width=WIDTH + BINS):
    row = torch.full((width,), torch.nan, device=device)
    row[PHASE], row[DETAILED] = phase, 1
    return row


def both(looked, phase, device):
    rows = [new_row(phase, device) for _ in range(2)]
    reference.sample(looked, rows[0])
    fast.sample(looked, rows[1])
    return rows


def assert_same(expected, made):
    torch.testing.assert_close(made[EXACT], expected[EXACT], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(made[MOMENTS], expected[MOMENTS], rtol=2e-5, atol=1e-6, equal_nan=True)
    assert made[SAMPLED] == expected[SAMPLED]
    assert torch.equal(made[WIDTH:], expected[WIDTH:])
    torch.testing.assert_close(made[SQNR], expected[SQNR], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("loops_with_bounds")
@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128", "128x128"])
@pytest.mark.parametrize(("format", "scaling"), [("e4m3", "power_of_two"), ("e5m2", "float32")])
def test_it_is_the_definition(granularity, format, scaling, device):
    x = torch.randn(72, 300, device=device) * torch.logspace(-6, 0, 300, device=device)
    x[5, 7], x[39:41] = 1e4, 0.0  # one of these is sampled: zeros are not flushed
    target = QuantSpec(format, granularity, scaling)
    looked = SampleInput(x.bfloat16(), quantize(x.bfloat16(), *target).scale, target, tied=True)
    expected, made = both(looked, 11, device)
    assert_same(expected, made)
    assert made[SQNR] > 10
    assert made[WIDTH:].sum() == (x[(11 + 4 * torch.arange(16, device=device)) % 72] != 0).sum()


@pytest.mark.usefixtures("loops_with_bounds")
def test_bins_are_written_where_they_are_wanted(device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    x = torch.randn(40, 64, device=device)
    looked = SampleInput(x, quantize(x, *target).scale, target)
    for module in (reference, fast):
        rows = new_row(3, device), new_row(3, device, WIDTH), new_row(3, device)
        rows[2][DETAILED] = 0
        for row in rows:
            module.sample(looked, row)
        assert torch.equal(rows[0][:SQNR], rows[1][:SQNR])
        assert torch.equal(rows[0][:SQNR], rows[2][:SQNR])
        assert rows[0][WIDTH:].sum() == 16 * 64
        assert rows[1][SQNR].isnan()
        assert rows[2][SQNR].isnan()
        assert rows[2][WIDTH:].isnan().all()


@pytest.mark.usefixtures("loops_with_bounds")
def test_of_codes_nothing_is_said_about_what_was_lost_before(device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    quantized = quantize(torch.randn(40, 64, device=device), *target)
    expected, made = both(SampleInput(quantized.codes, quantized.scale, target, is_coded=True), 3, device)
    assert_same(expected, made)
    values, _ = both(SampleInput(dequantize(quantized), quantized.scale, target), 3, device)
    known = [0, 1, 3, *range(5, SQNR), *range(WIDTH, WIDTH + BINS)]
    assert torch.equal(made[known], values[known])
    assert made[[2, 4, SQNR]].isnan().all()
    assert not made[[0, 1, 3, 5, 6, 7, 8]].isnan().any()


@pytest.mark.usefixtures("loops_with_bounds")
def test_a_fold_of_each_sampled_row(device):
    from octavo.kernels.sample import sampled_rows

    target, x = QuantSpec("e4m3", "row", "power_of_two"), torch.randn(50, 33, device=device)
    fold = torch.logspace(-3, 3, 50, device=device)[:, None] * torch.logspace(0, 2, 33, device=device)
    rows, scale = sampled_rows(50, new_row(5, device)), quantize(x * fold, *target).scale
    expected, made = both(SampleInput(x[rows], scale, target, fold[rows], rows=50), 5, device)
    assert_same(expected, made)
    assert made[WIDTH:].sum() == 16 * 33
    assert made[SQNR] > 25


@pytest.mark.usefixtures("loops_with_bounds")
def test_a_fold_edges_and_what_is_not_finite(device):
    x = torch.randn(40, 2100, device=device)
    x[3, 5], x[11, 8], x[12] = torch.nan, torch.inf, torch.nan
    fold = torch.logspace(-9, 2, 2100, device=device)[None]
    edges = torch.randn(40, 6, device=device)[:, ::5]
    edges[[3, 11, 12, 20]] = torch.nan
    edges[20, 0] = 1.0
    target = QuantSpec("e4m3", "row", "power_of_two")
    # A scale that was known before: some elements saturate.
    looked = SampleInput(x, quantize((x * fold).nan_to_num(), *target).scale / 4, target, fold, edges)
    expected, made = both(looked, 4321, device)
    assert_same(expected, made)
    assert made[STATS.index("saturated")] > 0
    assert made[STATS.index("nonfinite")] > 0


@pytest.mark.usefixtures("loops_with_bounds")
@pytest.mark.parametrize("finite", [0, 1])
def test_edges_that_are_nowhere_finite_say_nothing(finite, device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    x, edges = torch.randn(20, 64, device=device), torch.full((20, 2), torch.nan, device=device)
    edges[20 - finite :, 1] = 0.0
    expected, made = both(SampleInput(x, quantize(x, *target).scale, target, None, edges), 11, device)
    assert_same(expected, made)
    assert bool(made[STATS.index("nonfinite")] > 0) == bool(finite)


@pytest.mark.usefixtures("loops_with_bounds")
def test_a_sample_alone_of_a_transposed_view(device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    x = torch.randn(64, 33, device=device).t()
    from octavo.kernels.sample import sampled_rows

    rows = sampled_rows(33, new_row(5, device))
    scale = quantize(x.contiguous(), *target).scale
    whole, _ = both(SampleInput(x, scale, target), 5, device)
    expected, made = both(SampleInput(x[rows], scale, target, rows=33), 5, device)
    assert_same(expected, made)
    assert made[2:9].tolist() == pytest.approx(whole[2:9].tolist(), rel=1e-5)


@pytest.mark.usefixtures("loops_with_bounds")
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_moments_of_any_magnitude(magnitude, device):
    x = torch.randn(16, 64, device=device) * magnitude
    target = QuantSpec("e4m3", "row", "float32")
    expected, made = both(SampleInput(x, quantize(x, *target).scale, target), 0, device)
    torch.testing.assert_close(made[8], expected[8], rtol=2e-5, atol=0)
    assert made[6] / magnitude == pytest.approx(float(expected[6] / magnitude), rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("loops_with_bounds")
def test_one_element_and_a_rest(device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    x = torch.full((1, 1), -3.0, device=device)
    assert_same(*both(SampleInput(x, quantize(x, *target).scale, target), 0, device))
    expected, made = both(SampleInput(x, quantize(x, *target).scale, target), -1, device)
    assert made[:PHASE].isnan().all()
    assert expected[:PHASE].isnan().all()


@pytest.mark.usefixtures("loops_with_bounds")
def test_of_two_micro_batches_the_larger_amax_and_nonfinite_stay(device):
    target = QuantSpec("e4m3", "row", "power_of_two")
    for module in (reference, fast):
        row = new_row(0, device)
        for x in (torch.tensor([[9.0, torch.nan]], device=device), torch.tensor([[1.0, 3.0]], device=device)):
            module.sample(SampleInput(x, quantize(x, *target).scale, target), row)
        assert (row[0], row[5], row[6]) == (9.0, 0.5, 2.0)
        assert row[WIDTH:].sum() == 2
