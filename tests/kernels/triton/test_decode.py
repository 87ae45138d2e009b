"""Values of rotated codes against float64 and the specification."""

import pytest
import torch

from octavo import kernels
from octavo.kernels.decode import LONGEST
from octavo.numerics import E4M3, INT8, PER_ROW, block_for, dequantize, quantize, rotate
from octavo.numerics.rotation import hadamard

triton_decode = pytest.importorskip("octavo.kernels.decode.triton")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("cols", "rotation"), [(256, 256), (192, 256), (208, 256), (300, 0), (384, -256)])
def test_decoded_rows_are_the_specifications(cols, rotation, dtype, device):
    x, block = torch.randn(24, cols, device=device), block_for(cols, rotation)
    x[3], x[4, 5] = 0.0, torch.nan
    made = quantize(x, INT8, PER_ROW, "float32", rotation=rotation)
    got = torch.empty(24, cols, dtype=dtype, device=device)
    triton_decode.decode_rows(made.codes, made.scale, block, got)
    assert torch.equal(got.nan_to_num(7.0), rotate(dequantize(made), block).to(dtype).nan_to_num(7.0))
    assert torch.equal(got.isnan().all(1), x.isnan().any(1))
    assert torch.equal(kernels.decode_rows(made, rotation, dtype).nan_to_num(7.0), got.nan_to_num(7.0))


@pytest.mark.parametrize(("format", "rotation"), [(INT8, 16), (INT8, -128), (E4M3, 64)])
def test_a_rotation_is_undone(format, rotation):
    x = torch.randn(16, 384, dtype=torch.float64)
    made = quantize(x.float(), format, PER_ROW, "float32", rotation=rotation)
    h = torch.block_diag(*[hadamard(rotation)] * (384 // abs(rotation)))
    exact = (made.codes.double() * made.scale.double()) @ h
    found = kernels.decode_rows(made, rotation, torch.float32)
    assert (found - exact).abs().max() < 1e-6 * exact.abs().max()
    assert (found - x).norm() < 0.04 * x.norm()


def test_rows_longer_than_a_program_holds_go_to_the_reference():
    made = quantize(torch.randn(1, LONGEST + 16), INT8, PER_ROW, "float32", rotation=16)
    out = torch.empty(1, LONGEST + 16)
    assert kernels.decode_rows(made, 16, torch.float32, out) is out
    assert torch.equal(out, rotate(dequantize(made), 16))
