"""Derivatives that FP8 layers do not have are refused in one line, by every layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import octavo
from octavo.errors import UnsupportedError

X = torch.randn(32, 64)


class Net(nn.Module):
    """A path around its layers: PyTorch's `once_differentiable` leaves their second derivative out in silence here."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.out = nn.LayerNorm(64), *(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = x * self.out(torch.tanh(self.q(x) * self.k(x)))
        return y


def converted() -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    octavo.convert(model, "folded", policy=octavo.Policy(min_gain=0.0))
    return model


def double_backward(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(X, torch.ones_like(X)))


def per_sample(model: nn.Module) -> Any:
    parameters = dict(model.named_parameters())
    loss = lambda p, x: functional_call(model, p, (x,)).sum()  # noqa: E731
    return vmap(grad(loss), in_dims=(None, 0))(parameters, torch.randn(3, 32, 64))


def batched(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x), x, torch.randn(3, 32, 64), is_grads_batched=True)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "double backward": double_backward,
    "vmap": lambda model: vmap(model)(torch.randn(3, 32, 64)),
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),)),
    "dual numbers": dual,
    "gradients per sample": per_sample,
    "batched gradients": batched,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_without_a_rule_is_refused_by_name(way: str) -> None:
    model = converted()
    with pytest.raises(UnsupportedError, match=r"octavo\.disabled\(model\)"):
        WAYS[way](model)
    model(X).sum().backward()  # what was refused leaves nothing behind
    with octavo.disabled(model):
        WAYS[way](model)


def test_threads_compute_what_one_does() -> None:
    model, found, errors = converted(), [], []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                x = torch.randn(32, 64, generator=draw).requires_grad_()
                y = model(x)
                (g,) = torch.autograd.grad(y.sum(), x)
                found.append((x, y, g))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors and len(found) == 160
    for x, y, g in found[::10]:
        again = model(x)
        assert torch.equal(again, y) and torch.equal(torch.autograd.grad(again.sum(), x)[0], g)
