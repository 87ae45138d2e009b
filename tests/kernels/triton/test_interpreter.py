"""What the tests change of Triton's interpreter, so that it is faster, still computes and checks as before."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter")


@triton.jit
def _sums_kernel(a_ptr, b_ptr, sums_ptr, products_ptr, n: tl.constexpr):
    at = tl.arange(0, n)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(sums_ptr + at[:, None] * n + at[None, :], a[:, None] + b[None, :])
    tl.store(products_ptr + at, a * b)


def sums_and_products(a, b):
    sums, products = (torch.zeros(n, dtype=a.dtype) for n in (16, 4))
    _sums_kernel[(1,)](a, b, sums, products, 4)
    return sums.view(4, 4), products


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_shapes_and_types_that_differ_are_broadcast_and_promoted(dtype):
    a, b = torch.tensor([1, -2, 3, 4], dtype=dtype), torch.tensor([5, 6, -7, 8], dtype=torch.int32)
    sums, products = sums_and_products(a, b)
    assert torch.equal(sums, a[:, None] + b) and torch.equal(products, a * b)


@pytest.mark.parametrize("large", [2**31 - 1, -(2**31)])
def test_an_integer_that_overflows_is_an_error(large):
    a, b = torch.tensor([0, 0, 0, large], dtype=torch.int32), torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    sums_and_products(a, torch.zeros_like(b))
    with pytest.raises(triton.runtime.errors.InterpreterError, match="overflow detected"):
        sums_and_products(a, b if large > 0 else -b)
