"""The reference norms against PyTorch's in float64, forward and backward, and their codes against `numerics`."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels.norm.reference import backward, forward
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import quantize

EPS = 1e-5
ROW = QuantSpec("e4m3", "row", "power_of_two")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_STEP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place of the dtype, relative; of FP32 what a dozen roundings leave."""

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both_norms = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
every_shape = pytest.mark.parametrize("shape", [(1, 1), (3, 7), (20, 300), (0, 16)], ids=str)


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * torch.exp(torch.randn(shape[0], 1)) + 0.3


def exact(x, weight, bias, centred):
    """PyTorch's own norm, in float64."""
    if centred:
        return F.layer_norm(x.double(), x.shape[1:], weight.double(), bias.double(), EPS)
    return F.rms_norm(x.double(), x.shape[1:], weight.double(), EPS)


@every_dtype
@both_norms
@every_shape
def test_y_is_pytorchs_rounded_once(shape, centred, dtype):
    x, weight, bias = matrix(*shape).to(dtype), torch.randn(shape[1]), torch.randn(shape[1])
    y, quantized, rstd, mean, *_ = forward(x, weight, bias if centred else None, EPS, None, centred)
    want = exact(x, weight, bias, centred)
    assert y.dtype == dtype and quantized is None and (mean is not None) == centred
    assert rstd.shape == (shape[0],) and rstd.dtype == torch.float32
    torch.testing.assert_close(y.double(), want, rtol=HALF_STEP[dtype] * 1.01, atol=4e-6)


@both_norms
@pytest.mark.parametrize("granularity", ["row", "1x128"])
@pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
def test_the_codes_are_those_of_y_before_it_is_rounded(centred, granularity, scaling):
    x, weight = matrix(9, 300).bfloat16(), torch.randn(300)
    target = QuantSpec("e4m3", granularity, scaling)
    y32 = forward(x.float(), weight, None, EPS, None, centred)[0]
    _, quantized, *_ = forward(x, weight, None, EPS, target, centred)
    want = quantize(y32, target.fmt, target.tile, target.scaling)
    assert torch.equal(quantized.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(quantized.scale, want.scale)


@every_dtype
@both_norms
@every_shape
def test_gradients_are_those_of_float64(shape, centred, dtype):
    x, weight, bias = matrix(*shape).to(dtype), torch.randn(shape[1]), torch.randn(shape[1])
    dy = torch.randn(shape).to(dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact(*leaves, centred).backward(dy.double())
    _, _, rstd, mean, *_ = forward(x, weight, None, EPS, None, centred)
    dx, dweight, dbias = backward(dy, x, weight, bias if centred else None, mean, rstd)
    size = float(leaves[0].grad.abs().max()) if x.numel() else 1.0
    assert dx.dtype == dtype and dweight.dtype == torch.float32
    torch.testing.assert_close(dx.double(), leaves[0].grad, rtol=HALF_STEP[dtype] * 1.01, atol=3e-6 * max(size, 1))
    torch.testing.assert_close(dweight.double(), leaves[1].grad, rtol=1e-5, atol=2e-5)
    if centred:
        torch.testing.assert_close(dbias.double(), leaves[2].grad, rtol=1e-5, atol=2e-5)


def test_without_parameters_there_are_no_gradients_of_them():
    x = matrix(4, 8)
    _, _, rstd, mean, *_ = forward(x, None, None, EPS, None, True)
    assert backward(x, x, None, None, mean, rstd)[1:] == (None, None)
