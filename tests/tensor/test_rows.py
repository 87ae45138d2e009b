"""Rows of an FP8 tensor: views that hold the codes and scales of those rows, and nothing else."""

import pytest
import torch

from octavo.errors import UnsupportedError
from octavo.tensor import FP8Tensor, is_distributed, local, rows_of


def tensor(rows=300, cols=48, granularity="row"):
    return FP8Tensor.from_tensor(torch.randn(rows, cols), granularity=granularity)


@pytest.mark.parametrize("count", [1, 2, 7, 300, 400])
def test_chunks_are_rows_of_the_values(count):
    x = tensor()
    parts, expected = x.chunk(count), x.dequantize().chunk(count)
    assert len(parts) == len(expected)
    for part, values in zip(parts, expected, strict=True):
        assert isinstance(part, FP8Tensor) and torch.equal(part.dequantize(), values)


def test_rows_are_a_view():
    x = tensor(4, 8)
    x[1:3].copy_(torch.ones(2, 8))
    assert torch.equal(x.dequantize()[1:3], torch.ones(2, 8)) and not torch.equal(x.dequantize()[0], torch.ones(8))


def test_rows_that_share_a_scale_with_others_are_read_only():
    x = tensor(4, 8, "tensor")
    before = x.dequantize()
    for part in (x[1:3], x[1:3].detach(), x.data[:2], x[:3][:2], x.chunk(2)[0]):
        with pytest.raises(UnsupportedError, match="share a scale"):
            part.copy_(100 * torch.ones(len(part), 8))
    with pytest.raises(UnsupportedError, match="share a scale"):
        x[:2] = 100 * torch.ones(2, 8)
    assert torch.equal(x.dequantize(), before)
    x[:4] = x[1:3].clone().copy_(torch.ones(2, 8)).dequantize().repeat(2, 1)
    assert torch.equal(x.dequantize(), torch.ones(4, 8))


@pytest.mark.parametrize(
    ("granularity", "start", "stop"), [("128x128", 128, 300), ("128x128", 0, 256), ("tensor", 5, 9)]
)
def test_rows_of_tiles(granularity, start, stop):
    x = tensor(granularity=granularity)
    part = FP8Tensor(*rows_of(x.quantized, start, stop), x.dtype)
    assert torch.equal(part.dequantize(), x.dequantize()[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(1, 128), (0, 100), (128, 299)])
def test_a_tile_is_not_cut(start, stop):
    with pytest.raises(UnsupportedError, match="128"):
        rows_of(tensor(granularity="128x128").quantized, start, stop)


def test_other_cuts_are_refused():
    x = tensor(4, 8)
    for cut in (lambda: x[:, :4], lambda: x[::2], lambda: torch.as_strided(x, (8, 4), (4, 1))):
        with pytest.raises(UnsupportedError):
            cut()


def test_new_ones_are_of_its_kind():
    x = tensor(4, 8)
    zeros = x.new_zeros(6, 8)
    assert isinstance(zeros, FP8Tensor) and torch.equal(zeros.dequantize(), torch.zeros(6, 8))
    assert type(x.new_empty(0)) is torch.Tensor
    assert torch.equal(torch.as_strided(x, x.shape, x.stride()).dequantize(), x.dequantize())


def test_a_plain_tensor_is_all_on_this_rank():
    for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), tensor(2, 2)):
        assert local(x) is x and not is_distributed(x)
