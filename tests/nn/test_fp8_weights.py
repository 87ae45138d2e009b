"""A layer computes with the codes of an FP8 weight as with a plain weight of the same values, bit for bit."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import Policy, kernels
from octavo.errors import UnsupportedError
from octavo.kernels.quant_spec import QuantSpec
from octavo.nn import Linear
from octavo.nn.fp8_weights import recipes_for_fp8_weights, unsupported_reason, values
from octavo.nn.functional import SavedWeights, dgrad, fprop, weight_fold
from octavo.nn.weight_codes import quantize_weights, quantize_weights_transposed
from octavo.numerics import quantize
from octavo.recipes import Recipe, load, names
from octavo.tensor import FP8Tensor

ROW = QuantSpec("e4m3", "row", "power_of_two")
TOKENS = 33
BF16_BACKWARD = {"name": "bf16 backward", "dgrad": {"precision": "bf16"}, "wgrad": {"precision": "bf16"}}


def settled(w: Tensor) -> Tensor:
    """Return values of codes whose quantisation gives these codes and scales again."""
    return FP8Tensor.from_tensor(FP8Tensor.from_tensor(w).dequantize()).dequantize()


def fp8(w: Tensor, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(FP8Tensor.from_tensor(w), requires_grad=requires_grad)


class Net(nn.Module):
    """Two layers on one input, a layer alone, and an MLP."""

    def __init__(self, stored: str, recipe: Any = "folded", fuse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k = nn.Linear(64, 96), nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(96, 64, bias=False)
        self.mlp = MLP()
        self.bfloat16()
        for layer in [m for m in self.modules() if isinstance(m, nn.Linear)]:
            layer.weight = nn.Parameter(settled(layer.weight))
        octavo.convert(self, recipe, policy=Policy(weights=stored, fuse=fuse))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        k = self.k(x)
        x = x + self.out(q * k.mean(-1, keepdim=True))
        return x + self.mlp(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def trained(net: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Return the output and all gradients of one step."""
    x = torch.randn(3, TOKENS // 3, 64, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
    y = net(x) if call is None else call(x)
    y.float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert all(type(gradient) is Tensor and gradient.dtype == torch.bfloat16 for gradient in gradients.values())
    return {"y": y.detach(), "x": x.grad, **gradients}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["folded", "folded_fast", BF16_BACKWARD])
def test_a_step_equals_that_of_plain_weights_of_the_same_values(recipe, fuse):
    assert_same(trained(Net("fp8", recipe, fuse)), trained(Net("unchanged", recipe, fuse)))


def test_no_weight_is_quantised():
    net = Net("fp8")
    with kernels.record() as ledger:
        trained(net)
    assert ledger.weights == 0


def test_a_layer_of_codes_is_what_the_specification_says():
    w, x = torch.randn(48, 64), torch.randn(5, 64)
    layer = Linear(64, 48, bias=False)
    layer.weight = fp8(w)
    x8 = quantize(x)
    expected = (x8.codes.float() @ layer.weight.codes.float().t()) * x8.scale * layer.weight.scale.t()
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_compiled_as_one_graph_it_is_the_same_also_after_a_step():
    torch.compiler.reset()
    net, eager = Net("fp8"), Net("fp8")
    compiled, kept = torch.compile(net, backend="aot_eager", fullgraph=True), []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assert_same(trained(net, compiled), trained(eager))
    for model in (net, eager):
        optimizer = octavo.optim.AdamW(model.parameters(), lr=0.1, states="fp32")
        optimizer.step()
        optimizer.zero_grad()
    assert_same(trained(net, compiled), trained(eager))
    # No transposed codes: those of no token are the weights' own.
    places = {p.codes.data_ptr() for p in net.parameters() if isinstance(p, FP8Tensor)}
    of_weights = [t for t in kept if t.dtype == torch.float8_e4m3fn and TOKENS not in t.shape]
    assert {t.data_ptr() for t in of_weights} == places


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_compiles(backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    torch.compiler.reset()
    layer, x = Linear(64, 48).bfloat16(), torch.randn(8, 64).bfloat16()
    layer.weight = fp8(layer.weight.detach())
    y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    y.float().sum().backward()
    # inductor may round a product and its bias together, once
    torch.testing.assert_close(y, layer(x), rtol=2**-7, atol=2**-7)
    assert type(layer.weight.grad) is Tensor


def test_a_recomputed_forward_is_the_same():
    net = Net("fp8")
    again = trained(net, lambda x: checkpoint(net, x, use_reentrant=False))
    assert_same(again, trained(Net("fp8")))


def test_a_disabled_layer_computes_with_its_values_and_has_a_gradient():
    net = Net("fp8", fuse=False)
    plain = copy.deepcopy(net)
    octavo.revert(plain)
    with octavo.disabled(net):
        assert_same(trained(net), trained(plain))


def test_a_frozen_weight_has_no_gradient():
    layer, x = Linear(64, 48), torch.randn(5, 64, requires_grad=True)
    layer.weight = fp8(layer.weight, requires_grad=False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_plain_and_fp8_weights_share_a_stack(places):
    plain = [nn.Parameter(settled(torch.randn(n, 64))) for n in (48, 32)]
    mixed = [fp8(w) if i in places else w for i, w in enumerate(plain)]
    x_MK, g, plan = torch.randn(9, 64), quantize(torch.randn(9, 80)), load("folded").plan

    def saved(stack: list[Tensor]) -> SavedWeights:
        return SavedWeights(weights=stack, rows=(48, 32))

    for way in (
        lambda stack: fprop([x_MK], quantize(x_MK), quantize_weights(stack, ROW), stack, plan, torch.float32),
        lambda stack: [dgrad([], g, saved(stack), plan, torch.float32)],
        lambda stack: [weight_fold(saved(stack), plan)],
        lambda stack: [quantize_weights(stack, ROW).stack.codes.float(), quantize_weights(stack, ROW).stack.scale],
    ):
        for a, b in zip(way(mixed), way(plain), strict=True):
            assert torch.equal(a, b)


def test_a_stack_with_an_fp8_weight_is_not_quantised_transposed():
    with pytest.raises(UnsupportedError, match="rounded a second time"):
        quantize_weights_transposed([torch.randn(48, 64), fp8(torch.randn(32, 64))], ROW)


def test_layers_of_plain_and_of_fp8_weights_share_an_input():
    net, plain = Net("fp8"), Net("unchanged")
    net.k.weight, net.mlp.up.weight = plain.k.weight, plain.mlp.up.weight
    plain = copy.deepcopy(plain)
    assert_same(trained(net), trained(plain))


def test_a_stack_without_copies_in_fprop(monkeypatch):
    net, cat = Net("fp8"), torch.cat

    def watched(tensors, *args, **kwargs):
        assert all(tensor.element_size() > 1 for tensor in tensors), "the codes were copied"
        return cat(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", watched)
    with torch.no_grad():
        net(torch.randn(5, 64).bfloat16())


@pytest.mark.parametrize("name", names())
def test_a_recipe_that_refuses_says_so_when_a_layer_runs_by_it(name):
    recipe: Recipe = load(name)
    layer = Linear(64, 64, bias=False, recipe=recipe) if not recipe.needs_calibration else None
    if layer is None or name in (*recipes_for_fp8_weights(), "bf16"):
        return
    assert unsupported_reason(recipe) is not None
    layer.weight = fp8(layer.weight)
    with pytest.raises(UnsupportedError, match=r"rounded a second time.*folded"):
        layer(torch.randn(5, 64, requires_grad=True)).sum().backward()


def test_which_recipes_compute_with_fp8_weights():
    assert recipes_for_fp8_weights() == ["folded", "folded_fast"]
    assert unsupported_reason(load(BF16_BACKWARD)) is None
    assert "fprop is in BF16" in unsupported_reason(load("bf16"))
    assert "dgrad quantises the transposed weight" in unsupported_reason(load("rowwise"))
    assert "E4M3 128x128" in unsupported_reason(load("block"))


def test_codes_of_another_kind_are_refused():
    layer = Linear(64, 64)
    layer.weight = nn.Parameter(FP8Tensor.from_tensor(layer.weight, granularity="tensor"))
    with pytest.raises(UnsupportedError, match=r"holds the codes of e4m3 tensor.*wants those of e4m3 row"):
        layer(torch.randn(5, 64))


def test_codes_of_another_rounding_are_refused():
    recipe = load(
        {"name": "stochastic", "fprop": {"weight": {"rounding": "stochastic"}}, "dgrad": {"precision": "bf16"}}
    )
    assert "stochastic" in unsupported_reason(recipe)


@pytest.mark.parametrize("rows", [0, 5])
def test_empty_batches(rows):
    layer = Linear(64, 32, bias=False)
    layer.weight = fp8(layer.weight)
    layer(torch.randn(rows, 64, requires_grad=True)).sum().backward()
    assert layer.weight.grad.shape == (32, 64)
    assert bool((layer.weight.grad == 0).all()) == (rows == 0)


def test_values_of_a_plain_weight_are_the_weight():
    w = nn.Parameter(torch.randn(4, 4))
    assert values(w, torch.float32) is w
    assert torch.equal(values(fp8(w), torch.float64), FP8Tensor.from_tensor(w).dequantize(torch.float64))
