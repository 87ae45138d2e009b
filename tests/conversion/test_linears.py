"""Subclasses of `nn.Linear` by what their `forward` computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.conversion.linears import computes_linear
from octavo.nn import Linear


class Casting(nn.Linear):
    """nanochat's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class Delegating(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ByHand(nn.Linear):
    """Falcon's."""

    def forward(self, input: Tensor) -> Tensor:
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class ScaledByOne(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3)


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-50, 50)


class Wide(nn.Linear):
    """A sum over more than 60 features is something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.shape[-1] > 60 else 1)


class InSingle(nn.Linear):
    """Computes in FP32 whatever its input, as some routers do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Quantised(nn.Linear):
    """BitNet's: a straight-through estimator."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + (self.weight.sign() - self.weight).detach()
        return F.linear(x, weight, self.bias)


class Updated(nn.Linear):
    """A low-rank update in the layer itself, which begins at zero."""

    def __init__(self, *sizes: int, **options: bool) -> None:
        super().__init__(*sizes, **options)
        self.up, self.down = nn.Parameter(torch.zeros(sizes[1], 4)), nn.Parameter(torch.zeros(4, sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


@pytest.mark.parametrize("kind", [Delegating, ByHand])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_however_it_is_written(kind, bias):
    assert computes_linear(kind(64, 96, bias=bias)) or (kind is ByHand and bias)  # under autocast its result is FP32


def test_one_that_casts_its_weight():
    assert computes_linear(Casting(64, 96, bias=False))
    assert not computes_linear(Casting(64, 96)), "it drops the bias"


OTHERS = [Scaled, ScaledByOne, Clipped, Wide, InSingle, Noisy, Counting, Quantised, Updated]


@pytest.mark.parametrize("kind", OTHERS)
def test_anything_else_stays(kind):
    (row,) = octavo.plan(nn.Sequential(kind(64, 96, bias=False))).layers
    assert not row.is_fp8
    assert row.reason == f"{kind.__name__}, a subclass of nn.Linear, computes more than a linear layer"


def pair(kind: type[nn.Linear]) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    theirs, plain = nn.Sequential(kind(64, 96, bias=False)), nn.Sequential(nn.Linear(64, 96, bias=False))
    plain.load_state_dict(theirs.state_dict())
    octavo.convert(theirs)
    octavo.convert(plain)
    return theirs, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Casting, Delegating, ByHand])
def test_its_bits_are_those_of_a_converted_linear_layer(kind, dtype):
    theirs, plain = pair(kind)
    assert isinstance(theirs[0], kind) and isinstance(theirs[0], Linear)
    x = torch.randn(40, 64, dtype=dtype)
    results = []
    for model in (theirs, plain):
        y = model(x)
        y.float().square().sum().backward()
        results.append((y, model[0].weight.grad))
    assert results[0][0].dtype == dtype  # the weights are FP32
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_disabled_reverted_copied_and_converted_again():
    layer = Casting(64, 96, bias=False)
    model, x = nn.Sequential(layer), torch.randn(8, 64).bfloat16()
    expected = model(x)
    octavo.convert(model)
    y = model(x)
    assert not torch.equal(y, expected)
    with octavo.disabled(model):
        assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert octavo.convert(model).fp8_layers == 1
    assert torch.equal(model(x), y)
    assert octavo.revert(model) == 1 and type(layer) is Casting and "recognised_with" not in vars(layer)
    assert torch.equal(model(x), expected)


def test_a_changed_forward_runs_as_it_is(monkeypatch, caplog):
    model, x = nn.Sequential(Delegating(64, 96)), torch.randn(8, 64)
    octavo.convert(model)
    monkeypatch.setattr(Delegating, "forward", lambda self, x: nn.Linear.forward(self, x) * 3)
    assert torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias) * 3)
    assert "Delegating.forward has changed since octavo.convert" in caplog.text


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Delegating(64, 96, bias=False), Delegating(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


def test_an_mlp_of_such_layers_is_fused_until_one_of_them_changes(monkeypatch):
    model, x = nn.Sequential(Feed()), torch.randn(8, 64)
    assert [pattern.kind for pattern in octavo.convert(model).structures] == ["mlp"]
    before = model(x)
    monkeypatch.setattr(Delegating, "forward", lambda self, x: nn.Linear.forward(self, x) * 2)
    with octavo.disabled(model):
        expected = model(x)
    assert torch.equal(model(x), expected) and not torch.allclose(before, expected, rtol=0.5)


def test_it_compiles():
    torch.compiler.reset()
    theirs, plain = pair(Casting)
    x = torch.randn(40, 64)
    assert torch.equal(torch.compile(theirs, backend="eager", fullgraph=True)(x), plain(x))
