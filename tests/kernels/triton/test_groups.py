"""Groups of 32 quantised by Triton are the specification's, bit for bit, transposed or not, beside other targets."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import QuantSpec
from octavo.kernels.quantize import reference
from octavo.numerics import Quantized

groups = pytest.importorskip("octavo.kernels.quantize.triton_groups")

TARGETS = [QuantSpec(format, "1x32", "power_of_two") for format in ("e4m3", "e5m2")]
ROW = QuantSpec("e4m3", "row", "power_of_two")


def hard(rows: int, cols: int, device: str) -> Tensor:
    x = torch.randn(rows, cols) * torch.exp(3 * torch.randn(rows, 1))
    x[0, 0], x[-1, -1], x[:, cols // 2] = float("nan"), float("inf"), 0.0
    return x.bfloat16().to(device)


def same(one: Quantized | None, other: Quantized | None) -> bool:
    if one is None or other is None:
        return one is other
    codes = [q.codes.contiguous().view(torch.uint8) for q in (one, other)]
    return torch.equal(*codes) and torch.equal(one.scale, other.scale) and one.granularity == other.granularity


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(40, 160), (3, 70), (33, 31), (1, 129)])
def test_codes_and_scales_are_the_specifications(rows, cols, target, device):
    x = hard(rows, cols, device)
    for got, expected in zip(
        groups.quantize_pair([x], target, target), reference.quantize_pair([x], target, target), strict=True
    ):
        assert same(expected, got)


def test_sources_folds_and_other_targets_beside_it(device):
    sources = [torch.randn(40, width, device=device) for width in (20, 50)]
    row_fold, column_fold = torch.rand(1, 70, device=device) + 0.5, torch.rand(40, 1, device=device) + 0.5
    for targets in ((TARGETS[0], ROW), (ROW, TARGETS[0]), (None, TARGETS[1]), (TARGETS[1], None)):
        expected = reference.quantize_pair(sources, *targets, row_fold, column_fold)
        got = groups.quantize_pair(sources, *targets, row_fold, column_fold)
        assert all(same(one, other) for one, other in zip(expected, got, strict=True))


def test_what_it_refuses_is_what_others_refuse():
    assert groups.unsupported_reason(*TARGETS, None, ROW) is None
    assert "granularity" in groups.unsupported_reason(TARGETS[0], QuantSpec("e4m3", "3x5", "power_of_two"))
