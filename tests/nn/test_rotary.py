"""Rotary position embedding as a function with a gradient."""

import pytest
import torch

from octavo.lab.models.llama import rotary_tables
from octavo.nn.rotary import rotate


def model_rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """The rotation in plain PyTorch, with its gradient from autograd."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TE - second * sin_TE, second * cos_TE + first * sin_TE), dim=-1)
    return turned.to(x_BHTE.dtype)


def test_the_gradient_is_that_of_float64():
    x = torch.randn(2, 5, 3, 12, dtype=torch.float64).float().requires_grad_()
    cos, sin = rotary_tables(12, 5, 100.0)
    y, dy = rotate(x, cos, sin), torch.randn(2, 5, 3, 12)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    first, second = exact.chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    turned.backward(dy.double())
    torch.testing.assert_close(y.double(), turned, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_it_stands_in_for_the_rotation_of_the_models(compiled):
    def step(x_BTHE, cos, sin):
        return rotate(x_BTHE, cos, sin).transpose(1, 2)

    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    cos, sin = rotary_tables(16, 7, 10000.0)
    x = torch.randn(2, 7, 3, 16).bfloat16().requires_grad_()
    other = x.detach().clone().requires_grad_()
    y, want = run(x, cos, sin), model_rotate(other.transpose(1, 2), cos, sin)
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy)
    assert torch.equal(x.grad, other.grad)


def test_attention_gets_a_gradient_through_it():
    # The gradient arrives with the strides of attention's layout, heads first.
    cos, sin = rotary_tables(16, 7, 10000.0)
    q = torch.randn(2, 7, 3, 16, requires_grad=True)
    y = rotate(q, cos, sin).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)
    out.sum().backward()
    assert bool(q.grad.isfinite().all()) and q.grad.shape == q.shape
