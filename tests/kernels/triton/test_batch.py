"""Triton's batches against a loop over the matrices, bit for bit."""

import pytest
import torch

from octavo.kernels.batch import triton as fast
from octavo.kernels.quant_spec import QuantSpec, empty_scale
from octavo.kernels.quantize.reference import quantize_pair

pytestmark = pytest.mark.usefixtures("loops_with_bounds")


def check(made, x, rows, columns, row_fold, column_fold):
    for i, matrix in enumerate(x):
        folds = [None if fold is None else fold[i] for fold in (row_fold, column_fold)]
        want = quantize_pair([matrix], rows, columns, *folds)
        for ours, theirs, target in zip(made, want, (rows, columns), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours.codes[i].view(torch.uint8), theirs.codes.view(torch.uint8))
                assert torch.equal(ours.scale[i], theirs.scale)
                lies = empty_scale(target, *ours.codes.shape[1:], x.device)
                assert ours.scale[i].stride() == lies.stride()


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 132, 70)], ids=str)
@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128", "128x128"])
@pytest.mark.parametrize("turned", [False, True])
def test_codes_bit_for_bit(shape, granularity, turned, device):
    x = (torch.randn(shape, device=device) * 10.0 ** torch.arange(shape[0], device=device)[:, None, None]).bfloat16()
    x[0, 0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    target = QuantSpec("e4m3", granularity, "power_of_two")
    source = x.mT.contiguous().mT if turned and shape[2] % 4 == 0 else x
    folds = torch.rand(shape[0], 1, shape[2], device=device), torch.rand(shape[0], shape[1], 1, device=device)
    for rows, columns, given in ((target, target, folds), (target, None, (None, None)), (None, target, (None, None))):
        assert fast.unsupported_reason(source, rows, columns) is None
        check(fast.quantize_batch(source, rows, columns, *given), x, rows, columns, *given)


def test_parts_of_rows(device):
    x = torch.randn(3, 8, 64, device=device)[:, :, 10:40]
    target = QuantSpec("e5m2", "row", "float32")
    check(fast.quantize_batch(x, target, target, None, None), x, target, target, None, None)


def test_refuses_what_words_of_four_codes_cannot_hold(device):
    target, x = QuantSpec("e4m3", "row", "power_of_two"), torch.randn(2, 6, 16, device=device)
    assert (
        "multiple of 4" in fast.unsupported_reason(x, None, target) and fast.unsupported_reason(x, target, None) is None
    )


def test_every_byte_arrives(device):
    codes = torch.randint(0, 256, (3, 132, 20), dtype=torch.uint8, device=device)
    out = fast.transpose_batch(codes)
    assert out.is_contiguous() and torch.equal(out, codes.mT)
