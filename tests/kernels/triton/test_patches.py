"""Triton's patches against the passes over the unfolded matrix, bit for bit."""

import pytest
import torch

from octavo.kernels.patches import reference
from octavo.kernels.patches import triton as fast
from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize.reference import quantize_pair

pytestmark = pytest.mark.usefixtures("loops_with_bounds")

CASES = [
    ((2, 5, 6, 8), Window((3, 3), padding=(1, 1))),
    ((2, 6, 5, 64), Window((3, 2), stride=(2, 1), padding=(1, 0))),
    ((1, 7, 7, 12), Window((3, 3), padding=(2, 2), dilation=(2, 2))),
    ((3, 4, 5, 300), Window((1, 1), stride=(2, 2))),
    ((1, 1, 9, 16), Window((1, 3), stride=(1, 3))),
]
cases = pytest.mark.parametrize(("shape", "window"), CASES, ids=str)


@pytest.mark.covering(1)
@cases
@pytest.mark.parametrize(
    ("granularity", "scaling", "format"),
    [("row", "power_of_two", "e4m3"), ("tensor", "float32", "e5m2"), ("row", "float32", "e4m3")],
)
def test_codes_bit_for_bit(shape, window, granularity, scaling, format, device):
    x = torch.randn(shape, device=device) * torch.logspace(-3, 3, shape[1], device=device)[:, None, None]
    x[0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    x = x.bfloat16()
    row = QuantSpec(format, granularity, scaling)
    column = QuantSpec(format, "column" if granularity == "row" else "tensor", scaling)
    want = quantize_pair([reference.unfold(x, window)], row, column)
    for rows, columns in ((row, column), (row, None), (None, column)):
        made = fast.quantize_patches(x, window, rows, columns)
        for ours, theirs, asked in zip(made, want, (rows, columns), strict=True):
            assert (ours is None) == (asked is None)
            if ours is not None:
                assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
                assert torch.equal(ours.scale, theirs.scale) and ours.codes.is_contiguous()


@pytest.mark.parametrize(("shape", "window"), [*CASES, ((2, 3, 4, 68), Window((1, 1)))], ids=str)
def test_known_scales_spare_the_search(shape, window, device, monkeypatch):
    x = torch.randn(shape, device=device) * torch.logspace(-3, 3, shape[1], device=device)[:, None, None]
    row, column = (QuantSpec("e4m3", granularity, "power_of_two") for granularity in ("row", "column"))
    want = quantize_pair([reference.unfold(x, window)], row, column)
    monkeypatch.setattr(fast, "_patch_maxima", None)
    for ours, theirs in zip(fast.quantize_patches(x, window, row, column, want[0].scale), want, strict=True):
        assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(ours.scale, theirs.scale)


@pytest.mark.covering(1)
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fold_bit_for_bit(shape, window, dtype, device):
    high, wide = window.output(*shape[1:3])
    patches = torch.randn(shape[0] * high * wide, window.taps * shape[3], device=device).to(dtype)
    assert torch.equal(fast.fold(patches, window, shape), reference.fold(patches, window, shape))
