"""The Triton kernel gives the reference's codes, scales and amax, bit for bit, whichever scale is taken."""

import itertools

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec
from octavo.kernels.quantize_with_scale import reference
from octavo.numerics import Quantized

triton_quantize_at = pytest.importorskip("octavo.kernels.quantize_with_scale.triton")

TARGETS = [
    QuantSpec(format, "tensor", scaling)
    for format, scaling in itertools.product(["e4m3", "e5m2"], ["power_of_two", "float32"])
]
SCALES = {"unknown": 0.0, "too small": 2.0**-12, "too large": 0.37, "odd": 0.0123}
SEEN = 3.0
"""The stored amax before: below that of the data."""


def data(rows: int, cols: int, device: str) -> Tensor:
    x = 5 * torch.randn(rows, cols)
    x[1, 2], x[2, 3], x[3, 1] = float("nan"), float("inf"), -float("inf")
    return x.bfloat16().to(device)


def both(sources: list[Tensor], scale: float, *arguments) -> list[tuple[Quantized | None, Quantized | None, Tensor]]:
    results = []
    for module in (reference, triton_quantize_at):
        scale_and_amax = torch.tensor([scale, SEEN], device=sources[0].device)
        results.append((*module.quantize_with_scale(sources, scale_and_amax, *arguments), scale_and_amax))
    return results


def same(one: Quantized | None, other: Quantized | None) -> bool:
    if one is None or other is None:
        return one is other
    codes = [q.codes.view(torch.uint8) for q in (one, other)]
    return torch.equal(*codes) and torch.equal(one.scale, other.scale) and other.codes.is_contiguous()


@pytest.mark.covering(2)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_scales_and_amax_are_the_references(target, just_in_time, scale, device):
    x = data(70, 90, device)
    expected, got = both([x], scale, target, target, just_in_time, True)
    assert all(same(one, other) for one, other in zip(expected[:2], got[:2], strict=True))
    assert torch.equal(expected[2], got[2]) and got[2][0] == torch.tensor(scale)
    assert float(got[2][1]) == float(x[x.isfinite()].abs().max()) > SEEN


@pytest.mark.covering(1)
@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
@pytest.mark.parametrize(("rows", "cols"), [(64, 128), (1, 1), (5, 67), (129, 16)])
@pytest.mark.parametrize("scale", [0.0, 0.0123])
def test_shapes_and_either_way(rows, cols, scale, ways, device):
    x = torch.randn(rows, cols, device=device)
    targets = [TARGETS[1] if way else None for way in ways]
    expected, got = both([x], scale, *targets, False, True)
    assert all(same(one, other) for one, other in zip(expected[:2], got[:2], strict=True))
    assert torch.equal(expected[2], got[2])


@pytest.mark.parametrize("scale", [0.0, 0.0123, 2.0**-12])
def test_several_sources_have_one_scale(scale, device):
    sources = [torch.randn(66, width, device=device) * width for width in (64, 44, 60)]
    expected, got = both(sources, scale, TARGETS[1], TARGETS[1], True, True)
    assert all(same(one, other) for one, other in zip(expected[:2], got[:2], strict=True))
    assert torch.equal(expected[2], got[2])


def test_a_strided_source(device):
    x = torch.randn(40, 200, device=device)
    for view in (x[:, 7:90], x.t(), x[::2]):
        expected, got = both([view], 0.0123, TARGETS[1], TARGETS[1], False, True)
        assert all(same(one, other) for one, other in zip(expected[:2], got[:2], strict=True))


@pytest.mark.parametrize("scale", [0.0, 0.0123])
def test_nothing_is_written_to_a_cell_that_is_not_to_observe(scale, device):
    expected, got = both([data(66, 40, device)], scale, TARGETS[0], None, False, False)
    assert same(expected[0], got[0])
    assert got[2].tolist() == expected[2].tolist() == [torch.tensor(scale).item(), SEEN]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_matrix_without_a_maximum(value, device):
    x = torch.full((8, 16), value, device=device)
    expected, got = both([x], 0.0, TARGETS[1], TARGETS[1], True, True)
    assert same(expected[0], got[0]) and same(expected[1], got[1])
    assert got[2].tolist() == [0.0, SEEN]
