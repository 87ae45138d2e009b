"""The byte transpose moves bytes."""

import pytest
import torch

triton_transpose = pytest.importorskip("octavo.kernels.transpose.triton")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 300), (257, 16)], ids=str)
def test_every_byte_arrives(shape, dtype, device):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    out = triton_transpose.transpose(codes)
    assert out.shape == shape[::-1] and out.is_contiguous() and out.dtype == dtype
    assert torch.equal(out.view(torch.uint8), codes.view(torch.uint8).t())
