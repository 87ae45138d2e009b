"""Gradients that nobody asked for: where a result has none, neither has what it was computed from, as in PyTorch."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import kernels
from octavo.lab.memory.fake_kernels import _RMSNorm
from octavo.lab.models import moe
from octavo.nn import Conv2d, GroupedLinear, Linear
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.experts import Experts
from octavo.nn.fused import FusedMLP
from octavo.nn.matmul import matmul
from octavo.nn.norm import adopt
from octavo.nn.rotary import rotate
from octavo.recipes import RecipeLike, load
from octavo.tensor import FP8Tensor

SOURCE = Path(octavo.__file__).parent
EXCHANGES = {"_Collective", "_Exchange", "_Gather", "_ParallelExperts", "_Travel"}
"""Functions whose backward is a collective: a rank without a gradient takes part in it, with zeros."""


class Swallow(torch.autograd.Function):
    """Sends no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def converted(model: nn.Module, kind: type, recipe: str = "folded") -> nn.Module:
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0, min_features=16))
    assert any(type(module).__mro__.count(kind) for module in model.modules())
    return model


def attention() -> Callable[[Tensor], Tensor]:
    layer = ScaledDotProduct("out")
    layer.keep_codes(load("folded"))
    return lambda x: layer(*(x.view(1, 5, 2, 16),) * 3)


def norm() -> nn.Module:
    layer = nn.RMSNorm(32)
    adopt(layer, None, "fp8")
    return layer


FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: Linear(32, 32),
    "in high precision": lambda: Linear(32, 32, recipe="bf16"),
    "shared": lambda: converted(Pair(), Linear),
    "mlp": lambda: converted(nn.Sequential(MLP()), FusedMLP),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4, 4)), Conv2d(2, 8, 3)),
    "grouped": lambda: _GroupedTokens(),
    "experts": lambda: converted(_RoutedTokens(), Experts),
    "experts by products": lambda: _RoutedTokens(),
    "matmul": lambda: lambda x: matmul(x[None], x.t()[None], load("folded")),
    "matmul with a matrix": lambda: lambda x: matmul(x, x.t(), load("folded")),
    "rotary": lambda: lambda x: rotate(x.view(1, 5, 2, 16), *rotary_tables()),
    "head": lambda: lambda x: linear_cross_entropy(x, x, torch.arange(5), recipe="folded"),
    "norm": norm,
    "attention": attention,
    "norm in a memory estimate": lambda: lambda x: _RMSNorm.apply(x, None, 1e-6),
}


class _GroupedTokens(GroupedLinear):
    def __init__(self, recipe: RecipeLike = "folded") -> None:
        super().__init__(2, 32, 48, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.tensor([2, 5], dtype=torch.int32))


class _RoutedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = moe.Experts(2, 32, 48)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([[0], [1], [1], [0], [1]]), torch.ones(5, 1))


def rotary_tables() -> tuple[Tensor, Tensor]:
    angles = torch.rand(5, 8)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_no_gradient_in_none_out(kind):
    function = FUNCTIONS[kind]()
    x = torch.randn(5, 32, requires_grad=True)
    y = function(x)
    assert y.requires_grad
    (Swallow.apply(y).sum() + torch.zeros((), requires_grad=True)).backward(retain_graph=True)
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    assert x.grad is None and all(p.grad is None for p in parameters)
    y.sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in parameters)


def test_an_fp8_weight_that_is_read_as_values():
    made = kernels.quantize(torch.randn(32, 32), "e4m3", "row", "power_of_two")
    weight = FP8Tensor(*made, torch.float32, "power_of_two").requires_grad_()
    y = torch.randn(5, 32) @ weight.dequantize()
    (Swallow.apply(y).sum() + torch.zeros((), requires_grad=True)).backward(retain_graph=True)
    assert weight.grad is None
    y.sum().backward()
    assert weight.grad is not None


def test_every_function_says_so():
    functions = {
        node.name: ast.unparse(node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
    }
    assert set(functions) > EXCHANGES
    silent = {name for name, source in functions.items() if "set_materialize_grads(False)" not in source}
    assert silent == EXCHANGES


class _Operators(TorchDispatchMode):
    """Names of what is computed, in order, but for views and copies of a tensor's metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _evaluated(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[str], Tensor]:
    with _Operators() as operators:
        y = module(x)
    return operators.names, y


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("convolution", "rowwise"), ("matmul", "rowwise"), ("experts", "rotated")]
    + [(name, recipe) for name in ("linear", "grouped") for recipe in ("rotated", "rowwise")],
)
def test_without_gradients_no_codes_are_made_for_them(name: str, recipe: str) -> None:
    """Under no_grad a forward computes what that of a frozen layer does, and the result has the bits of training."""
    torch.manual_seed(0)
    chosen = load(recipe)
    made: dict[str, Callable[[], Any]] = {
        "linear": lambda: Linear(32, 32, recipe=chosen),
        "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4, 4)), Conv2d(2, 8, 3, recipe=chosen)),
        "grouped": lambda: _GroupedTokens(chosen),
        "experts": lambda: converted(_RoutedTokens(), Experts, recipe),
        "matmul": lambda: lambda x: matmul(x[None], x.t()[None], chosen),
    }
    module, x = made[name](), torch.randn(5, 32, requires_grad=True)
    trained = _evaluated(module, x)
    with torch.no_grad():
        found = _evaluated(module, x)
    if isinstance(module, nn.Module):
        module.requires_grad_(False)
    frozen = _evaluated(module, x.detach())
    assert found[0] == frozen[0] and torch.equal(found[1], trained[1])
    assert len(found[0]) < len(trained[0]) or name == "convolution"  # patches are quantised for wgrad in backward
