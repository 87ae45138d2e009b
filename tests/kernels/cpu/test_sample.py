"""Telemetry's sample in NumPy against its definition, and what is made later against what is made at once."""

import pytest
import torch

from octavo.kernels import quantize
from octavo.kernels.cpu import sample as host
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.reference import sample as reference
from octavo.kernels.sample import BINS, DETAILED, PHASE, SAMPLED, STATS, WIDTH, SampleInput, sample_soon, settle
from octavo.kernels.sample import sample as contract
from octavo.numerics import dequantize

SQNR = STATS.index("sqnr")
MOMENTS = [STATS.index(name) for name in ("mean", "variance", "kurtosis")]
EXACT = [number for number in range(SQNR) if number not in MOMENTS]
ROWS = QuantSpec("e4m3", "row", "power_of_two")


def new_row(phase=11, detailed=0.0):
    row = torch.full((WIDTH + BINS,), torch.nan)
    row[PHASE], row[DETAILED] = phase, detailed
    return row


def assert_is_the_definition(looked, phase=11, detailed=0.0):
    """Return what NumPy wrote: what PyTorch writes, twice, for amax and nonfinite grow."""
    expected, made = new_row(phase, detailed), new_row(phase, detailed)
    for _ in range(2):
        reference.sample(looked, expected)
        host.sample(looked, made)
        torch.testing.assert_close(made[EXACT], expected[EXACT], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(made[MOMENTS], expected[MOMENTS], rtol=1e-6, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(made[SQNR:], expected[SQNR:], rtol=0, atol=0, equal_nan=True)
    return made


@pytest.mark.parametrize("granularity", ["row", "column", "tensor", "1x128", "128x128"])
@pytest.mark.parametrize(("format", "scaling"), [("e4m3", "power_of_two"), ("e5m2", "float32")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_is_the_definition(granularity, format, scaling, dtype):
    x = torch.randn(150, 300) * torch.logspace(-6, 0, 300)
    x[149, 299], x[40] = 1e4, 0.0
    target = QuantSpec(format, granularity, scaling)
    x = x.to(dtype)
    made = assert_is_the_definition(SampleInput(x, quantize(x, *target).scale, target, tied=True), detailed=1.0)
    assert made[0] == pytest.approx(float(x.abs().max()))  # it lies in no sampled row
    assert (made[2] + made[3] > 0) or format == "e5m2"


def test_a_transposed_view():
    x = torch.randn(33, 64).bfloat16().t()
    assert_is_the_definition(SampleInput(x, quantize(x.contiguous(), *ROWS).scale, ROWS), 3, detailed=1.0)


@pytest.mark.parametrize(
    "broken", [[], [(3, 5, torch.nan)], [(11, 8, torch.inf), (12, slice(None), -torch.inf)], "all"]
)
@pytest.mark.parametrize("edges", [False, True])
def test_what_is_not_finite_a_fold_and_edges(broken, edges):
    x, fold = torch.randn(40, 210), torch.logspace(-9, 2, 210)[None]
    for down, across, value in [(slice(None), slice(None), torch.nan)] if broken == "all" else broken:
        x[down, across] = value
    y = torch.randn(40, 6).bfloat16()[:, ::5]
    y[[3, 20]] = torch.nan
    y[20, 0] = 1.0
    scale = quantize((x * fold).nan_to_num(0.0, 1.0, 1.0), *ROWS).scale / 4  # known before: some elements saturate
    made = assert_is_the_definition(SampleInput(x, scale, ROWS, fold, y if edges else None), 4321)
    assert (made[STATS.index("nonfinite")] > 0) == (edges or bool(broken))
    assert (made[STATS.index("saturated")] > 0) == (broken != "all")


def test_codes_a_fold_of_each_row_and_one_element():
    quantized = quantize(torch.randn(40, 64), *ROWS)
    made = assert_is_the_definition(SampleInput(quantized.codes, quantized.scale, ROWS, is_coded=True), 3)
    assert made[[2, 4]].isnan().all()
    values = new_row(3)
    reference.sample(SampleInput(dequantize(quantized), quantized.scale, ROWS), values)
    assert torch.equal(made[[0, 1, 3, 5]], values[[0, 1, 3, 5]])
    fold = torch.logspace(-3, 3, 16)[:, None] * torch.logspace(0, 2, 64)
    assert_is_the_definition(SampleInput(torch.randn(16, 64), quantized.scale, ROWS, fold, rows=40), 5)
    assert_is_the_definition(SampleInput(torch.full((1, 1), -3.0), torch.ones(1, 1), ROWS), 5)
    assert_is_the_definition(SampleInput(torch.zeros(3, 5), torch.ones(3, 1), ROWS, tied=True), 5)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_moments_of_any_magnitude(magnitude):
    x = torch.randn(16, 64) * magnitude
    assert_is_the_definition(
        SampleInput(x, quantize(x, "e4m3", "row", "float32").scale, ROWS._replace(scaling="float32"))
    )


def test_of_two_micro_batches_the_larger_amax_and_nonfinite_stay():
    row = new_row(0)
    for x in (torch.tensor([[9.0, torch.nan]]), torch.tensor([[1.0, 3.0]])):
        sample_soon(SampleInput(x, quantize(x, *ROWS).scale, ROWS), row)
    settle()
    assert (row[0], row[5], row[6]) == (9.0, 0.5, 2.0)


def test_what_is_flushed_even_of_the_product_with_its_scale_is_no_zero():
    x = torch.tensor([[0.0, 1e-30, 1.0]])
    assert assert_is_the_definition(SampleInput(x, torch.full((1, 1), 1e20), ROWS))[2] == pytest.approx(2 / 3)


@pytest.mark.parametrize("target", [ROWS, ROWS._replace(granularity="tensor")])
@pytest.mark.parametrize("detailed", [0.0, 1.0])
def test_what_is_made_later_is_of_the_tensor_as_it_was(target, detailed):
    x, fold, y = torch.randn(300, 24), torch.rand(1, 24), torch.randn(300, 2)
    x[7, 3] = torch.nan
    y[7] = torch.nan
    scale = quantize((x * fold).nan_to_num(), *target).scale
    at_once, later = new_row(detailed=detailed), new_row(detailed=detailed)
    contract(SampleInput(x, scale, target, fold, y), at_once)
    sample_soon(SampleInput(x, scale, target, fold, y), later)
    assert bool(later[0].isnan()) == (detailed == 0)
    for tensor in (x, scale, fold, y):
        tensor.fill_(9.0)
    settle()
    torch.testing.assert_close(later, at_once, rtol=0, atol=0, equal_nan=True)
    settle()
    torch.testing.assert_close(later, at_once, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", [ROWS, ROWS._replace(granularity="tensor")])
def test_memory_that_was_looked_at_can_still_be_resized(target):
    """FSDP frees the memory of weights so; `Tensor.numpy` alone would forbid it."""
    x, scale, fold, y = torch.randn(64, 8), torch.ones(64, 1), torch.ones(1, 8), torch.randn(64, 2)
    for look in (contract, sample_soon):
        look(SampleInput(x, scale if target is ROWS else scale[:1], target, fold, y), new_row())
    for tensor in (x, scale, fold, y):
        tensor.untyped_storage().resize_(0)
    settle()


def test_what_waits_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(host, "MOST_HELD", 10_000)
    x, rows = torch.randn(64, 32), [new_row() for _ in range(20)]
    for row in rows:
        sample_soon(SampleInput(x, torch.ones(64, 1), ROWS), row)
        assert len(host._waiting) * 16 * 32 * 4 <= 10_000
    settle()
    assert all(row[SAMPLED] == 16 * 32 for row in rows)


def test_at_rest_nothing_is_read():
    row = new_row(-1)
    for look in (contract, sample_soon):
        look(SampleInput(torch.randn(40, 8), torch.ones(40, 1), ROWS), row)
    assert not host._waiting
    assert row[:PHASE].isnan().all()
