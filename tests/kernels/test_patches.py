"""Patches: unfold against PyTorch's, fold as its transpose, codes as those of the unfolded matrix."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.patches import fold, quantize_patches, unfold, unfold_rows
from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair

WINDOWS = [
    Window((1, 1)),
    Window((1, 1), stride=(2, 2)),
    Window((3, 3), padding=(1, 1)),
    Window((3, 2), stride=(2, 1), padding=(1, 0)),
    Window((2, 3), stride=(3, 3)),
    Window((3, 3), padding=(2, 2), dilation=(2, 2)),
    Window((1, 5), padding=(0, 2), dilation=(1, 1)),
]
windows = pytest.mark.parametrize("window", WINDOWS, ids=lambda w: "-".join(map(str, w.flat)))


@windows
def test_unfold_and_fold_are_those_of_pytorch(window):
    x = torch.randn(2, 7, 8, 5)
    options = {"padding": window.padding, "stride": window.stride, "dilation": window.dilation}
    theirs = F.unfold(x.movedim(-1, 1), window.kernel, **options)  # (B, C kh kw, L)
    theirs = theirs.view(2, 5, window.taps, -1).permute(0, 3, 2, 1).reshape(-1, window.taps * 5)
    assert torch.equal(unfold(x, window), theirs)
    high, wide = window.output(7, 8)
    assert len(theirs) == 2 * high * wide
    back = F.fold(
        theirs.view(2, high * wide, window.taps, 5).permute(0, 3, 2, 1).flatten(1, 2), (7, 8), window.kernel, **options
    )
    torch.testing.assert_close(fold(theirs, window, (2, 7, 8, 5)), back.movedim(1, -1))


@windows
@pytest.mark.parametrize("rows", ["row", "tensor", "1x128", None])
def test_codes_are_those_of_the_unfolded_matrix(window, rows):
    x = torch.randn(2, 7, 8, 5).bfloat16()
    row = rows and QuantSpec("e4m3", rows, "power_of_two")
    column = QuantSpec("e4m3", "column", "power_of_two")
    for ours, theirs in zip(
        quantize_patches(x, window, row, column), quantize_pair([unfold(x, window)], row, column), strict=True
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours.codes.float(), theirs.codes.float()) and torch.equal(ours.scale, theirs.scale)


def test_no_image_and_a_kernel_that_does_not_fit():
    window = Window((3, 3), padding=(1, 1))
    codes, _ = quantize_patches(torch.randn(0, 4, 4, 3), window, QuantSpec("e4m3", "row", "power_of_two"), None)
    assert codes.codes.shape == (0, 27)
    assert fold(torch.randn(0, 27), window, (0, 4, 4, 3)).shape == (0, 4, 4, 3)
    assert Window((5, 5)).output(3, 9) == (0, 5)


def test_a_pixel_window_copies_nothing():
    x = torch.randn(2, 3, 4, 5)
    assert unfold(x, Window((1, 1))).data_ptr() == x.data_ptr()
    assert not Window((1, 1), padding=(1, 1)).is_pixel and not Window((1, 1), stride=(2, 1)).is_pixel


@pytest.mark.parametrize(
    "window", [Window((3, 3), (2, 1), (1, 2)), Window((1, 1)), Window((2, 3), padding=(0, 1), dilation=(2, 1))]
)
def test_rows_of_patches_are_those_of_all(window):
    x = torch.randn(2, 6, 7, 3)
    x[0, 0, 0] = torch.nan
    patches = unfold(x, window)
    rows = torch.randperm(len(patches))[:9]
    assert torch.equal(unfold_rows(x, window, rows).nan_to_num(9.0), patches[rows].nan_to_num(9.0))
