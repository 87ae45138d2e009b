"""Batched GEMMs: by definition one GEMM a matrix, with the scales of that matrix alone."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError
from octavo.kernels.batch import Batch
from octavo.kernels.bmm import batched_unsupported_reason, bmm
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import PER_ROW, PER_TENSOR, Quantized, dequantize


def batch_of(shape, granularity, fmt="e4m3"):
    """Return a batch whose matrices differ in size by powers of ten, and the matrices."""
    x = torch.randn(shape) * 10.0 ** torch.arange(shape[0])[:, None, None]
    parts = [kernels.quantize(matrix, *QuantSpec(fmt, granularity, "power_of_two")) for matrix in x]
    codes = torch.stack([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    return Batch(codes, torch.stack([part.scale for part in parts]), parts[0].granularity), parts


@pytest.mark.parametrize(
    ("left", "right"), [("row", "row"), ("tensor", "tensor"), ("tensor", "row"), ("1x128", "128x128"), ("1x32", "1x32")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_one_gemm_a_matrix_bit_for_bit(left, right, dtype):
    a, a_parts = batch_of((3, 48, 160), left)
    b, b_parts = batch_of((3, 32, 160), right)
    expected = torch.stack([kernels.gemm(x, y, dtype) for x, y in zip(a_parts, b_parts, strict=True)])
    assert torch.equal(bmm(a, b, dtype), expected)


def test_against_float64():
    a, a_parts = batch_of((3, 48, 64), "row")
    b, b_parts = batch_of((3, 32, 64), "row")
    exact = [dequantize(x).double() @ dequantize(y).double().t() for x, y in zip(a_parts, b_parts, strict=True)]
    for y, expected in zip(bmm(a, b, torch.float32), exact, strict=True):
        assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("shape", [(0, 16, 32, 16), (2, 0, 32, 16), (2, 16, 0, 16), (2, 16, 32, 0)], ids=str)
def test_empty(shape):
    batch, rows, terms, cols = shape
    a = Batch(torch.empty(batch, rows, terms, dtype=torch.float8_e4m3fn), torch.ones(batch, rows, 1), PER_ROW)
    b = Batch(torch.empty(batch, cols, terms, dtype=torch.float8_e4m3fn), torch.ones(batch, cols, 1), PER_ROW)
    assert torch.equal(bmm(a, b, torch.bfloat16), torch.zeros(batch, rows, cols, dtype=torch.bfloat16))


def test_counts_every_product():
    a, b = batch_of((5, 16, 32), "row")[0], batch_of((5, 16, 32), "row")[0]
    with kernels.record() as ledger:
        bmm(a, b, torch.bfloat16)
    assert sum(ledger.gemms.values()) == 5


def test_shapes_that_do_not_fit():
    a, b = batch_of((2, 16, 32), "row")[0], batch_of((3, 16, 32), "row")[0]
    with pytest.raises(ConfigError, match=r"\(2, 16, 32\) and \(3, 16, 32\)"):
        bmm(a, b, torch.bfloat16)


def test_a_transposed_batch_holds_the_same_codes():
    a, parts = batch_of((3, 16, 32), "row")
    turned = a.transposed()
    assert turned.codes.is_contiguous() and turned.granularity == PER_ROW.transposed
    for matrix, part in zip(turned.matrices(), parts, strict=True):
        assert torch.equal(dequantize(matrix), dequantize(part).t())
    plain = turned.without_scale()
    assert plain.granularity == PER_TENSOR
    assert torch.equal(dequantize(plain.matrices()[1]), parts[1].codes.float().t())


def test_compiles_with_its_shape_function():
    a, b = batch_of((2, 16, 32), "row")[0], batch_of((2, 48, 32), "row")[0]
    args = bmm.encode(a, b, torch.bfloat16, "slow")
    torch.library.opcheck(bmm.operator, args, test_utils="test_faketensor")


def test_a_cpu_has_no_batched_kernel():
    assert (
        batched_unsupported_reason(torch.device("cpu"), ("e4m3", "row"), ("e4m3", "row"))
        == "no grouped FP8 GEMM for cpu"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("row", "row"), ("row", "tensor"), ("tensor", "tensor")], ids=str)
@pytest.mark.parametrize("shape", [(4, 64, 128, 96), (3, 33, 32, 16), (2, 256, 2048, 512)], ids=str)
def test_one_launch_gives_what_the_loop_gives(kinds, shape):
    batch, rows, terms, cols = shape
    a, a_parts = batch_of((batch, rows, terms), kinds[0])
    b, b_parts = batch_of((batch, cols, terms), kinds[1])
    a, b = (Batch(x.codes.cuda(), x.scale.cuda(), x.granularity) for x in (a, b))
    with kernels.record() as ledger:
        y = bmm(a, b, torch.bfloat16)
    if batched_unsupported_reason(torch.device("cuda"), *(("e4m3", kind) for kind in kinds)) is None:
        assert ledger.gemms == {"grouped_bmm": batch}
    for result, p, q in zip(y.cpu(), a_parts, b_parts, strict=True):
        exact = dequantize(Quantized(*p)).double() @ dequantize(Quantized(*q)).double().t()
        assert (result - exact).abs().max() <= 2.0**-8 * exact.abs().max() * 1.01
