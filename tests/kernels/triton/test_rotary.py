"""Triton's rotation against its reference, bit for bit: the same products and sums, nothing fused."""

import pytest
import torch

from octavo.kernels.rotary.reference import rotate as reference
from octavo.kernels.rotary.triton import rotate as fused

SHAPES = [(1, 1, 1, 2), (2, 5, 3, 12), (1, 9, 7, 64), (2, 33, 2, 128)]


def tables(batch: int, length: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 10 * torch.randn(batch, length, width, device=device)
    return angles.cos(), angles.sin()


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("conjugate", [False, True])
def test_bit_for_bit(shape, dtype, conjugate, device):
    x = torch.randn(shape, device=device).to(dtype)
    for batch, width in {(1, shape[3] // 2), (shape[0], shape[3])}:
        cos, sin = tables(batch, shape[1], width, device)
        y = fused(x, cos, sin, conjugate)
        assert y.dtype == dtype and y.is_contiguous()
        assert torch.equal(y, reference(x, cos, sin, conjugate))


def test_any_strides(device):
    cos, sin = tables(2, 6, 8, device)
    wide = torch.cat((cos, cos), dim=-1)[..., :8], torch.cat((sin, sin), dim=-1)[..., :8]
    fused_qkv = torch.randn(2, 6, 3 * 4 * 16, device=device).bfloat16()
    heads_first = torch.randn(2, 4, 6, 16, device=device).bfloat16()
    channels_apart = torch.randn(2, 6, 16, 4, device=device).bfloat16().transpose(2, 3)
    for x in (fused_qkv[..., 64:128].view(2, 6, 4, 16), heads_first.transpose(1, 2), channels_apart):
        want = reference(x, cos, sin, False)
        assert torch.equal(fused(x, cos, sin, False), want)
        assert torch.equal(fused(x, *wide, False), want)


def test_tables_in_16_bits(device):
    cos, sin = (t.bfloat16() for t in tables(1, 6, 8, device))
    x = torch.randn(2, 6, 4, 16, device=device).bfloat16()
    assert torch.equal(fused(x, cos, sin, True), reference(x, cos, sin, True))
