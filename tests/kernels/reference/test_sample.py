"""Telemetry's sample in NumPy against the same statistics in plain PyTorch, operation by operation."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels import quantize
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.sample import (
    BINS,
    DETAILED,
    LOWEST,
    PHASE,
    SAMPLED,
    STATS,
    WIDTH,
    SampleInput,
    count,
    limits,
    mark_idle,
    reference,
    sampled_rows,
    warm_up,
)
from octavo.kernels.sample import sample as contract
from octavo.numerics import E4M3, E5M2, dequantize, format_named

SQNR = STATS.index("sqnr")
MOMENTS = [STATS.index(name) for name in ("mean", "variance", "kurtosis")]
EXACT = [number for number in range(SQNR) if number not in MOMENTS]
ROWS = QuantSpec("e4m3", "row", "power_of_two")


def new_row(phase=11, detailed=0.0):
    row = torch.full((WIDTH + BINS,), torch.nan)
    row[PHASE], row[DETAILED] = phase, detailed
    return row


def assert_is_the_definition(operand, phase=11, detailed=0.0):
    """Return what NumPy wrote: what PyTorch writes, twice, for amax and nonfinite grow."""
    expected, made = new_row(phase, detailed), new_row(phase, detailed)
    for _ in range(2):
        by_definition(operand, expected)
        reference.sample(operand, made)
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


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_limits_are_those_of_rounding(fmt):
    """On both sides of each limit, the neighbouring FP32 values, by PyTorch's conversion."""
    bounds = torch.tensor(limits(fmt)[:2])
    sides = torch.stack(
        [torch.nextafter(bounds, torch.zeros(())), bounds, torch.nextafter(bounds, torch.tensor(torch.inf))]
    )
    codes = sides.to(fmt.dtype).float()
    assert (codes[:, 0] == 0).tolist() == [True, True, False]  # flushed: up to the limit
    assert (codes[:, 1] < fmt.smallest_normal).tolist() == [True, False, False]  # subnormal: below it


def test_edges_that_are_nowhere_finite_say_nothing():
    x, y = torch.randn(40, 64), torch.full((40, 2), torch.nan)
    operand = SampleInput(x, quantize(x, *ROWS).scale, ROWS, None, y)
    assert assert_is_the_definition(operand)[STATS.index("nonfinite")] == 0
    y[39, 1] = 0.0
    assert assert_is_the_definition(operand)[STATS.index("nonfinite")] == pytest.approx(39 / (40 * 64))
    x[:, 5] = y[39, 1] = torch.nan  # the sample itself has them
    assert assert_is_the_definition(operand)[STATS.index("nonfinite")] == pytest.approx(1 / 64)


def test_codes_a_fold_of_each_row_and_one_element():
    quantized = quantize(torch.randn(40, 64), *ROWS)
    made = assert_is_the_definition(SampleInput(quantized.codes, quantized.scale, ROWS, is_coded=True), 3)
    assert made[[2, 4]].isnan().all()
    values = new_row(3)
    by_definition(SampleInput(dequantize(quantized), quantized.scale, ROWS), values)
    assert torch.equal(made[[0, 1, 3, 5]], values[[0, 1, 3, 5]])
    fold = torch.logspace(-3, 3, 16)[:, None] * torch.logspace(0, 2, 64)
    assert_is_the_definition(SampleInput(torch.randn(16, 64), quantized.scale, ROWS, fold, rows=40), 5)
    assert_is_the_definition(SampleInput(torch.full((1, 1), -3.0), torch.ones(1, 1), ROWS), 5)
    assert_is_the_definition(SampleInput(torch.zeros(3, 5), torch.ones(3, 1), ROWS, tied=True), 5)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_limits_are_where_the_codes_change(format):
    fmt = format_named(format)
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[format]
    smallest, largest = float(ml_dtypes.finfo(kind).smallest_normal), float(ml_dtypes.finfo(kind).max)

    def around(limit):
        """The values of the codes of the last number below a limit and of the first above it."""
        limit = np.float32(limit)
        return [float(np.nextafter(limit, to, dtype=np.float32).astype(kind)) for to in (0, np.inf)]

    flushed, subnormal, saturated = (around(limit) for limit in limits(fmt))
    assert flushed == [0.0, float(ml_dtypes.finfo(kind).smallest_subnormal)]
    assert subnormal[0] < smallest == subnormal[1]
    assert saturated[0] == largest and not np.isfinite(saturated[1])


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_moments_of_any_magnitude(magnitude):
    x = torch.randn(16, 64) * magnitude
    assert_is_the_definition(
        SampleInput(x, quantize(x, "e4m3", "row", "float32").scale, ROWS._replace(scaling="float32"))
    )


def test_of_two_micro_batches_the_larger_amax_and_nonfinite_stay():
    row = new_row(0)
    for x in (torch.tensor([[9.0, torch.nan]]), torch.tensor([[1.0, 3.0]])):
        contract(SampleInput(x, quantize(x, *ROWS).scale, ROWS), row)
    assert (row[0], row[5], row[6]) == (9.0, 0.5, 2.0)


def test_what_is_flushed_even_of_the_product_with_its_scale_is_no_zero():
    x = torch.tensor([[0.0, 1e-30, 1.0]])
    assert assert_is_the_definition(SampleInput(x, torch.full((1, 1), 1e20), ROWS))[2] == pytest.approx(2 / 3)


@pytest.mark.parametrize("target", [ROWS, ROWS._replace(granularity="tensor")])
def test_memory_that_was_looked_at_can_still_be_resized(target):
    """FSDP frees the memory of weights so; `Tensor.numpy` alone would forbid it."""
    x, scale, fold, y = torch.randn(64, 8), torch.ones(64, 1), torch.ones(1, 8), torch.randn(64, 2)
    contract(SampleInput(x, scale if target is ROWS else scale[:1], target, fold, y), new_row())
    for tensor in (x, scale, fold, y):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0
    other = torch.ones(8)
    other.numpy()
    with pytest.raises(RuntimeError, match="resizable"):
        other.untyped_storage().resize_(0)


def test_at_rest_nothing_is_read():
    row = new_row(-1)
    for look in (contract, reference.sample):
        look(SampleInput(torch.randn(40, 8), torch.ones(40, 1), ROWS), row)
    assert row[:PHASE].isnan().all()


# The statistics in plain PyTorch

_ALWAYS = STATS[:-1]
"""What is written without bins, too: all but sqnr."""


def by_definition(operand: SampleInput, row: Tensor) -> None:
    """Write what `sample` is documented to write, in PyTorch."""
    found = torch.stack([*_stats(operand, row)])
    before = row[: len(_ALWAYS)]
    found = torch.where(_grows(row.device), torch.fmax(found, before), found)
    looks = row[PHASE] >= 0
    row[: len(_ALWAYS)] = torch.where(looks, found, before)
    row[SAMPLED] = torch.where(looks, float(operand.x.shape[1] * count(operand.shape[0])), row[SAMPLED])
    if len(row) > WIDTH and (row.is_cuda or row[DETAILED] > 0):
        asks = looks & (row[DETAILED] > 0)
        for at, new in zip((slice(len(_ALWAYS), len(STATS)), slice(WIDTH, None)), detail(operand, row), strict=True):
            row[at] = torch.where(asks, new, row[at])


def _grows(device: torch.device) -> Tensor:
    """Return which statistics are the largest of all micro-batches, a flag each."""
    return torch.tensor([name in ("amax", "nonfinite") for name in _ALWAYS], device=device)


def _read(operand: SampleInput, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sample, FP32 (count(R), C), what is quantised of it, with its fold, and the scales, broadcastable."""
    rows = sampled_rows(operand.shape[0], row)
    scale = scales_of(operand, rows)
    x = (operand.x if operand.rows is not None else _rows_of(operand.x, rows)).float()
    x = x * scale if operand.is_coded else x
    return x, x if operand.fold is None else x * operand.fold, scale


def _stats(operand: SampleInput, row: Tensor) -> list[Tensor]:
    """Return the statistics in the order of `_ALWAYS`, FP32 and of no dimension."""
    total_rows, cols = operand.shape
    x, read, scale_of_each = _read(operand, row)
    y = (read * (1 / scale_of_each)).abs()
    magnitude = x.abs()
    finite = magnitude < torch.inf
    zeroed, normal, largest = limits(operand.target.fmt)
    flushed = finite & (read != 0) & (y <= zeroed)
    subnormal = finite & (y > zeroed) & (y < normal)
    saturated = finite & (y > largest)
    *shares, broken = _shares(torch.stack([flag.sum() for flag in (flushed, subnormal, saturated, ~finite)]), x.numel())
    if operand.edges is not None:
        lost = (~torch.isfinite(operand.edges.float())).all(dim=1).sum()
        lost = torch.where(lost < total_rows, lost, 0)
        broken = torch.maximum(broken, _shares(lost[None], total_rows * cols)[0])
    if operand.is_coded:
        shares[0], shares[2] = (share * torch.nan for share in shares[::2])
    scale = operand.scale.max()
    return [_amax(operand, magnitude, finite, scale), scale, *shares, broken, *_moments(x, finite)]


def detail(operand: SampleInput, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return sqnr in dB (1,), NaN where nothing was lost or nothing is known, and the bins (BINS,), FP32."""
    x, read, scale = _read(operand, row)
    y, fmt = read * (1 / scale), operand.target.fmt
    finite = (x.abs() < torch.inf) & (y.abs() < torch.inf)
    codes = y.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    signal, noise = (torch.where(finite, part, 0.0).double() for part in (read, read - codes * scale))
    ratio = signal.square().sum() / noise.square().sum()
    sqnr = torch.where((ratio > 0) & (ratio < torch.inf), 10 * ratio.log10(), torch.nan).float()
    place = torch.where(y == 0, 0, (torch.frexp(y).exponent - 1 - LOWEST).clamp(0, BINS - 1))
    counted = (finite & (read != 0)).float()
    bins = torch.zeros(BINS, device=y.device).scatter_add_(0, place.flatten().long(), counted.flatten())
    return (sqnr * torch.nan if operand.is_coded else sqnr)[None], bins


def scales_of(operand: SampleInput, rows: Tensor) -> Tensor:
    """Return the scale of each sampled element, broadcastable to (len(rows), C)."""
    total_rows, cols = operand.shape
    height, width = operand.target.tile.tile(total_rows, cols)
    scale = operand.scale[rows // height]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, dim=1)[:, :cols]


def _amax(operand: SampleInput, magnitude: Tensor, finite: Tensor, scale: Tensor) -> Tensor:
    largest = torch.where(finite, magnitude, 0.0).max()
    if operand.bound:
        largest = torch.where(scale > 2.0**-126, torch.maximum(largest, scale * operand.bound), largest)
    total_rows, cols = operand.shape
    height, width = operand.target.tile.tile(total_rows, cols)
    if not operand.reads_tile:
        return largest
    at = operand.scale.flatten().argmax()  # the first of the largest
    top, left = at // operand.scale.shape[1] * height, at % operand.scale.shape[1] * width
    across = torch.arange(height, device=at.device) + top, torch.arange(width, device=at.device) + left
    inside = (across[0] < total_rows)[:, None] & (across[1] < cols)
    tile = _rows_of(operand.x, across[0].clamp(max=total_rows - 1)).float()[:, across[1].clamp(max=cols - 1)].abs()
    tile = tile * scale if operand.is_coded else tile
    return torch.maximum(largest, torch.where(inside & (tile < torch.inf), tile, 0.0).max())


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a matrix; PyTorch has no index of FP8 tensors."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def _shares(found: Tensor, total: int) -> list[Tensor]:
    """Return what share of a total each count is, FP32."""
    return [*(found.double() / total).float()]


def _moments(x: Tensor, finite: Tensor) -> list[Tensor]:
    """Return mean, variance and kurtosis of what is finite. Powers are of x over a power of two: none leaves FP64."""
    kept = torch.where(finite, x, 0.0).double()
    number = finite.sum()
    mean = kept.sum() / number
    off = torch.where(finite, kept - mean, 0.0)
    square = off * off
    second = square.sum() / number
    fourth = (square * square).sum() / number
    return [mean.float(), second.float(), (fourth / (second * second)).float()]


def test_rows_of_an_idle_buffer_are_left_alone_but_in_a_warm_up() -> None:
    buffer = torch.full((2, WIDTH), torch.nan)
    buffer[:, PHASE] = 3.0
    x = torch.randn(8, 16)
    operand = SampleInput(x, quantize(x, *ROWS).scale, ROWS)
    mark_idle(buffer[1], True)
    contract(operand, buffer[0])
    assert buffer[:, :PHASE].isnan().all()
    with warm_up():
        contract(operand, buffer[0])
    assert not buffer[0, :SQNR].isnan().any()
    mark_idle(buffer, False)
    contract(operand, buffer[1])
    assert torch.equal(buffer[0, :SQNR], buffer[1, :SQNR])
