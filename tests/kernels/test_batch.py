"""A batch of matrices: by definition each is quantised and transposed by itself."""

import pytest
import torch

from octavo.kernels.batch import _quantize_batch, quantize_batch, transpose_batch
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair


def folded_batch(shape):
    """Return matrices that differ in size by powers of ten, and folds for both sides."""
    x = torch.randn(shape) * 10.0 ** torch.arange(shape[0])[:, None, None]
    return x, torch.rand(shape[0], 1, shape[2]), torch.rand(shape[0], shape[1], 1)


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("turned", [False, True])
def test_each_is_quantised_by_itself(granularity, turned):
    x, row_fold, column_fold = folded_batch((3, 40, 24))
    target = QuantSpec("e4m3", granularity, "power_of_two")
    source = x.mT.contiguous().mT if turned else x
    made = quantize_batch(source, target, target, row_fold, column_fold)
    for i, matrix in enumerate(x):
        want = quantize_pair([matrix], target, target, row_fold[i], column_fold[i])
        for ours, theirs in zip(made, want, strict=True):
            assert torch.equal(ours.codes[i].float(), theirs.codes.float())
            assert torch.equal(ours.scale[i], theirs.scale) and ours.codes.is_contiguous()


def test_only_what_is_asked_for():
    target = QuantSpec("e4m3", "row", "power_of_two")
    x = torch.randn(2, 8, 16)
    assert quantize_batch(x, None, target)[0] is None and quantize_batch(x, target, None)[1] is None


def test_transposes():
    codes = torch.randn(3, 8, 20).to(torch.float8_e4m3fn)
    out = transpose_batch(codes)
    assert out.is_contiguous() and torch.equal(out.float(), codes.float().mT)


@pytest.mark.parametrize("shape", [(2, 8, 16), (2, 7, 130)], ids=str)
def test_shape_functions(shape):
    x, row_fold, column_fold = folded_batch(shape)
    row, tile = QuantSpec("e4m3", "row", "power_of_two"), QuantSpec("e4m3", "1x128", "power_of_two")
    for args in ((x, row, tile, row_fold, column_fold), (x, row, None, None, None)):
        torch.library.opcheck(_quantize_batch.operator, _quantize_batch.encode(*args), test_utils="test_faketensor")
    codes = x.to(torch.float8_e4m3fn)
    torch.library.opcheck(transpose_batch.operator, (codes,), test_utils="test_faketensor")
