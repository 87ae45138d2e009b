"""Attention: the definition against float64, PyTorch's fused kernels against the definition, codes in place of y."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.kernels import attention as contract
from octavo.kernels.attention import attention, attention_backward, decode
from octavo.kernels.quantize import quantize
from octavo.numerics import Quantized, dequantize, sqnr_db

SHAPES = {"heads alike": (2, 24, 4, 4, 16), "grouped": (2, 24, 4, 2, 16), "one token": (3, 1, 2, 1, 8)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@pytest.fixture(params=["fused", "reference"])
def backend(request, monkeypatch):
    """PyTorch's kernel for a CPU, and the definition."""
    if request.param == "reference":
        monkeypatch.setattr(contract, "_backend", lambda *_: contract.SDPBackend.MATH)
    return request.param


def drawn(shape, dtype=torch.float32):
    batch, length, heads, groups, width = shape
    q, dy = (torch.randn(batch, length, heads, width).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, length, groups, width).to(dtype) for _ in range(2))
    return q, k, v, dy


def exact(q, k, v, dy, causal, scale=None):
    """y, the logsumexp and the gradients, in float64 by autograd."""
    q, k, v = (x.double().transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    scores = q @ wide[0].mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = scores.softmax(-1) @ wide[1]
    y.backward(dy.double().transpose(1, 2))
    return y.detach().transpose(1, 2), scores.detach().logsumexp(-1), *(x.grad.transpose(1, 2) for x in (q, k, v))


def codes_of(y: torch.Tensor, granularity: str = "row") -> Quantized:
    return quantize(y.flatten(2).flatten(0, 1), "e4m3", granularity)


@every_shape
@causal_or_not
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_the_definition(shape, causal, scale, backend):
    q, k, v, dy = drawn(shape)
    y, lse = attention(q, k, v, causal=causal, scale=scale)
    assert y.is_contiguous() and lse.dtype == torch.float32
    want_y, want_lse, *want = exact(q, k, v, dy, causal, scale)
    torch.testing.assert_close(y.double(), want_y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    whole = Quantized(y.flatten(2).flatten(0, 1), torch.ones(y.shape[0] * y.shape[1], 1), codes_of(y).granularity)
    got = attention_backward(dy, q, k, v, whole, lse, causal=causal, scale=scale)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)


@every_shape
def test_the_forward_is_pytorchs_to_the_bit(shape):
    q, k, v, _ = drawn(shape, torch.bfloat16)
    y, _ = attention(q, k, v)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    want = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=q.shape[2] != k.shape[2])
    assert torch.equal(y, want.transpose(1, 2))


@every_shape
@causal_or_not
def test_codes_lose_what_a_code_loses(shape, causal, backend):
    q, k, v, dy = drawn(shape)
    y, lse = attention(q, k, v, causal=causal)
    got = attention_backward(dy, q, k, v, codes_of(y), lse, causal=causal)
    _, _, *want = exact(q, k, v, dy, causal)
    dq, dk, dv = (sqnr_db(theirs, mine) for mine, theirs in zip(got, want, strict=True))
    assert dv > 60  # y has no part in it
    if shape[1] > 1:  # a single token has gradients of zero
        assert min(dq, dk) > 22


def test_codes_are_read_as_their_values_would_be(backend):
    q, k, v, dy = drawn(SHAPES["grouped"], torch.bfloat16)
    y, lse = attention(q, k, v)
    codes = codes_of(y)
    values = Quantized(dequantize(codes, torch.bfloat16), torch.ones_like(codes.scale), codes.granularity)
    got, want = (attention_backward(dy, q, k, v, given, lse) for given in (codes, values))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("granularity", ["row", "tensor", "1x128", "128x128"])
@pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cols", [256, 200])
def test_decoding(granularity, scaling, dtype, cols):
    x = quantize(torch.randn(9, cols) * torch.logspace(-3, 2, 9)[:, None], "e4m3", granularity, scaling)
    got = decode(x, dtype)
    assert got.dtype == dtype and torch.equal(got, dequantize(x, dtype))


@pytest.mark.parametrize("shape", [(0, 5, 2, 1, 8), (2, 0, 2, 1, 8), (2, 5, 0, 0, 8)], ids=str)
def test_nothing_at_all(shape):
    q, k, v, dy = drawn(shape)
    y, lse = attention(q, k, v)
    assert y.shape == q.shape and lse.shape == (shape[0], shape[2], shape[1])
    got = attention_backward(dy, q, k, v, codes_of(y), lse)
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("change", ["groups", "width", "length", "dims", "dtype"])
def test_what_does_not_fit(change):
    q, k, v, _ = drawn(SHAPES["grouped"])
    other = {
        "groups": (k.repeat(1, 1, 2, 1)[:, :, :3], v.repeat(1, 1, 2, 1)[:, :, :3]),
        "width": (k[..., :8], v),
        "length": (k[:, :3], v[:, :3]),
        "dims": (k[0], v[0]),
        "dtype": (k.half(), v),
    }
    with pytest.raises(ConfigError, match=r"attention takes q"):
        attention(q, *other[change])


def test_the_operators_are_well_formed():
    q, k, v, dy = drawn(SHAPES["grouped"], torch.bfloat16)
    y, lse = attention(q, k, v)
    codes, forward, backward = codes_of(y), attention, attention_backward
    check = functools.partial(torch.library.opcheck, test_utils="test_faketensor")
    check(forward.operator, forward.encode(q, k, v, True, None))
    check(backward.operator, backward.encode(dy, q, k, v, codes, lse, True, 0.1))


@pytest.mark.gpu
@every_shape
@causal_or_not
@pytest.mark.parametrize("name", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_every_backend_of_a_gpu(shape, causal, name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (shape[0], 64, shape[2], shape[2] if name.startswith("EFF") else shape[3], 64)
    q, k, v, dy = (x.cuda() for x in drawn(shape, torch.bfloat16))
    want_y, want_lse, *want = exact(*(x.cpu() for x in (q, k, v, dy)), causal)
    with sdpa_kernel(getattr(SDPBackend, name)):
        y, lse = attention(q, k, v, causal=causal)
        whole = Quantized(y.flatten(2).flatten(0, 1), torch.ones(y.shape[0] * y.shape[1], 1).cuda(), codes_of(y)[2])
        got = attention_backward(dy, q, k, v, whole, lse, causal=causal)
    other = attention_backward(dy, q, k, v, whole, lse, causal=causal)  # by whatever is chosen without a setting
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-2, atol=1e-2)
    assert sqnr_db(want_y, y.cpu().double()) > 40
    for mine, theirs, others in zip(got, want, other, strict=True):
        assert sqnr_db(theirs, mine.cpu().double()) > 35
        assert sqnr_db(theirs, others.cpu().double()) > 35
