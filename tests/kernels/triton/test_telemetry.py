"""Counts made in the pass that quantises are those of the definition."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec
from octavo.kernels.telemetry import count, new_stats, read

fused = pytest.importorskip("octavo.kernels.triton.quantize")

ROW = QuantSpec("e4m3", "row", "power_of_two")


def uneven(rows: int, cols: int, device: str) -> Tensor:
    """Numbers of very different sizes in every tile, and what is not finite."""
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-30, 3, (rows, cols)).float())
    x[3, 5], x[7, 9], x[8, :7], x[9], x[:, 11] = torch.nan, torch.inf, -torch.inf, 0, 0
    return x.bfloat16().to(device)


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(70, 150), (64, 128)], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "column", "1x128", "128x1", "128x128"])
@pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
def test_counts_are_those_of_the_definition(format, granularity, scaling, shape, device):
    target = QuantSpec(format, granularity, scaling)
    x, rows, columns = uneven(*shape, device), new_stats(device), new_stats(device)
    lying, turned = fused.quantize_pair([x], target, target, stats=(rows, columns))
    assert read(rows) == read(count(x, lying)) and read(columns) == read(count(x.t(), turned))
    assert read(rows).flushed > 50 and read(rows).non_finite == 9
    alone = new_stats(device)
    made = fused.quantize_pair([x], target, None, stats=(alone, None))[0]
    assert read(alone) == read(rows) == read(count(x, made))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_folds_and_several_sources_count_what_is_quantised(device):
    sources = [uneven(40, width, device) for width in (64, 50)]
    fold = torch.exp2(torch.randint(-12, 12, (1, 114)).float()).to(device)
    x, target = torch.cat(sources, dim=1).float() * fold, QuantSpec("e4m3", "row", "power_of_two")
    for parts in (sources, [torch.cat(sources, dim=1)]):
        stats = new_stats(device)
        made = fused.quantize_pair(parts, target, None, fold, stats=(stats, None))[0]
        assert read(stats) == read(count(x, made))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_counts_add_up_and_change_no_code(device):
    x, target, stats = uneven(40, 60, device), QuantSpec("e4m3", "tensor", "float32"), new_stats(device)
    plain = fused.quantize_pair([x], target, None)[0]
    for _ in range(2):
        counted = fused.quantize_pair([x], target, None, stats=(stats, None))[0]
        assert torch.equal(counted.codes.view(torch.uint8), plain.codes.view(torch.uint8))
    once, twice = read(count(x, plain)), read(stats)
    assert (twice.amax, *twice[1:]) == (once.amax, *(2 * number for number in once[1:]))


def test_what_is_past_the_largest_code_is_counted(device):
    # No search of ours gives such a scale: the kernel is handed one.
    from octavo.kernels.triton.output import Output

    x, target, stats = torch.tensor([[464.0, 465.0, -500.0, 3.0]] * 5).to(device), ROW, new_stats(device)
    row = Output(target, 5, 4, torch.device(device), scale=torch.ones(5, 1, device=device), from_amax=True)
    nothing = Output(None, 5, 4, torch.device(device))
    fused._write(x, 0, (5, 4), row, nothing, None, None, (stats, None))
    assert read(stats) == read(count(x, row.quantized)) and read(stats).saturated == 10
