"""The grouped linear against a loop of FP8 linear layers, bit for bit, and against float64."""

import copy

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import gemm_by, record
from octavo.kernels.gemm import KERNELS, choose
from octavo.kernels.grouped import grouped_gemm
from octavo.nn import GroupedLinear, Linear
from octavo.nn.grouped import grouped_linear
from octavo.numerics import sqnr_db
from octavo.recipes import load

RECIPES = ["folded", "folded_fast", "rowwise", "rotated", "bf16"]
COUNTS = [[40, 25, 31], [0, 17, 0, 70, 1, 0], [64], [0, 0, 0]]
counts = pytest.mark.parametrize("counts", COUNTS, ids=str)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
INTEGER = {"format": "int8", "rotation": 16, "scaling": "float32"}
ITS_OWN = {"base": "rowwise", "fprop": {"input": INTEGER, "weight": INTEGER}}
"""INT8 forward, and backward GEMMs that quantise their operands by themselves."""


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def tokens(counts: list[int], features: int) -> torch.Tensor:
    return torch.randn(sum(counts), features, requires_grad=True)


@counts
@pytest.mark.parametrize("recipe", [*RECIPES, ITS_OWN], ids=str)
def test_it_is_a_loop_of_linear_layers(recipe, counts, monkeypatch):
    monkeypatch.setitem(choose.__globals__, "KERNELS", KERNELS[-1:])  # PyTorch's GEMM sums in another order
    monkeypatch.setitem(choose.__globals__, "_choices", {})
    layer, x, ends = GroupedLinear(len(counts), 48, 32, recipe=recipe), tokens(counts, 48), ends_of(counts)
    y = layer(x, ends)
    dy = torch.randn_like(y)
    y.backward(dy)
    start = 0
    for e, end in enumerate(ends.tolist()):
        linear, twin_x = Linear(48, 32, bias=False, recipe=recipe), x.detach()[start:end].requires_grad_()
        linear.weight.data = layer.weight.detach()[e]
        twin_y = linear(twin_x)
        twin_y.backward(dy[start:end])
        assert torch.equal(y[start:end], twin_y)
        assert torch.equal(x.grad[start:end], twin_x.grad)
        assert torch.equal(layer.weight.grad[e], linear.weight.grad)
        start = end
    assert y.shape == (sum(counts), 32) and layer.weight.grad.shape == (len(counts), 32, 48)


@pytest.mark.parametrize("name", ["exact", "hopper", "hopper-fast"])
@pytest.mark.parametrize("recipe", ["folded_fast", "rowwise"])
def test_an_accumulator_holds_for_the_products_of_each_expert(recipe, name, monkeypatch):
    monkeypatch.setitem(choose.__globals__, "KERNELS", KERNELS[-1:])
    monkeypatch.setitem(choose.__globals__, "_choices", {})
    counts = [40, 0, 150]
    layer, x, ends = GroupedLinear(3, 192, 32, recipe=recipe), tokens(counts, 192), ends_of(counts)
    dy = torch.randn(sum(counts), 32)
    usual = layer(x, ends)
    with gemm_by(name), record() as ledger:
        y = layer(x, ends)
        y.backward(dy)
    assert ledger.gemms.keys() == {name.partition("-")[0]} and not torch.equal(y, usual)
    for e, rows in ((0, slice(0, 40)), (2, slice(40, 190))):
        linear, twin_x = Linear(192, 32, bias=False, recipe=recipe), x.detach()[rows].requires_grad_()
        linear.weight.data = layer.weight.detach()[e]
        with gemm_by(name):
            twin_y = linear(twin_x)
            twin_y.backward(dy[rows])
        assert torch.equal(y[rows], twin_y) and torch.equal(x.grad[rows], twin_x.grad)
        assert torch.equal(layer.weight.grad[e], linear.weight.grad)
    assert torch.equal(layer(x, ends), usual)  # until the block ends


def test_slow_takes_the_usual_grouped_kernel_and_forbids_it_to_be_fast(monkeypatch):
    seen = []
    run = grouped_gemm.run.__globals__["run_kernel"]
    spy = lambda name, x, operands, *rest: seen.append(operands[6:]) or run(name, x, operands, *rest)  # noqa: E731
    monkeypatch.setitem(grouped_gemm.run.__globals__, "run_kernel", spy)
    layer, x, ends = GroupedLinear(1, 64, 32, recipe="folded_fast"), tokens([9], 64), ends_of([9])
    with torch.no_grad():
        layer(x, ends)
        with gemm_by("slow"):
            layer(x, ends)
    assert [each for each in seen if each and isinstance(each[0], bool)] == [(True,), (False,)]


@every_recipe
def test_against_float64(recipe):
    counts = [70, 0, 33, 129]
    layer, x = GroupedLinear(4, 80, 64, recipe=recipe), tokens(counts, 80)
    y = layer(x, ends_of(counts))
    dy = torch.randn_like(y)
    y.backward(dy)
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    exact_y = torch.einsum("tk,tnk->tn", exact_x, exact_w[expert])
    exact_y.backward(dy.double())
    assert min(sqnr_db(exact_y, y), sqnr_db(exact_x.grad, x.grad), sqnr_db(exact_w.grad, layer.weight.grad)) > 27.0
    assert not layer.weight.grad[1].any()


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_in_high_precision_is_exact(gemm):
    counts, ends = [20, 13], ends_of([20, 13])
    recipe = {"dgrad": {"weight": {"granularity": "row"}}, "wgrad": {"input": {"granularity": "row"}}}
    layer = GroupedLinear(2, 48, 32, recipe={**recipe, gemm: {"precision": "bf16"}})
    plain, x = copy.deepcopy(layer), tokens(counts, 48)
    plain.enabled = False
    plain_x = x.detach().clone().requires_grad_()
    y, plain_y = layer(x, ends), plain(plain_x, ends)
    y.backward(torch.ones_like(y) / 3)
    plain_y.backward(torch.ones_like(y) / 3)
    pairs = {"fprop": (y, plain_y), "dgrad": (x.grad, plain_x.grad), "wgrad": (layer.weight.grad, plain.weight.grad)}
    for name, (ours, theirs) in pairs.items():
        assert torch.allclose(ours, theirs, atol=1e-5) == (name == gemm)


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "rotated"])
def test_a_nan_poisons_its_token_and_the_weight_of_its_expert(recipe):
    counts = [20, 13, 9]
    layer, x = GroupedLinear(3, 48, 32, recipe=recipe), tokens(counts, 48).detach()
    x[25, 7] = torch.nan
    y = layer(x.requires_grad_(), ends_of(counts))
    y.backward(torch.ones_like(y))
    assert torch.isnan(y).any(1).nonzero().tolist() == [[25]] and not torch.isnan(x.grad).any()
    assert torch.isnan(layer.weight.grad).flatten(1).any(1).tolist() == [False, True, False]


def test_weights_are_quantised_once_per_forward():
    layer, ends = GroupedLinear(2, 32, 32), ends_of([5, 6])
    with record() as ledger:
        for _ in range(3):
            layer(tokens([5, 6], 32), ends).sum().backward()
    assert ledger.weights == 3


def test_compiled_code_computes_the_same():
    layer, x, ends = GroupedLinear(3, 48, 32), tokens([9, 0, 20], 48), ends_of([9, 0, 20])
    twin_x = x.detach().clone().requires_grad_()
    y, compiled = layer(x, ends), torch.compile(layer, fullgraph=True, backend="aot_eager")(twin_x, ends)
    y.square().sum().backward()
    gradient = layer.weight.grad.clone()
    layer.weight.grad = None
    compiled.square().sum().backward()
    assert torch.equal(y, compiled) and torch.equal(x.grad, twin_x.grad) and torch.equal(gradient, layer.weight.grad)


@pytest.mark.parametrize("recipe", ["folded", "rowwise"])  # rowwise puts codes of several experts together
def test_autocast_gives_its_dtype_and_the_gradients_of_the_parameters(recipe):
    layer, x = GroupedLinear(2, 32, 32, recipe=recipe), tokens([5, 6], 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, ends_of([5, 6]))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_what_does_not_fit():
    layer = GroupedLinear(2, 32, 16)
    assert repr(layer) == "GroupedLinear(experts=2, in_features=32, out_features=16, recipe=folded)"
    with pytest.raises(ConfigError, match=r"takes x \(T, 32\) and int32 ends \(2,\), got \(5, 31\)"):
        layer(torch.randn(5, 31), ends_of([2, 3]))
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        layer(torch.randn(5, 32), ends_of([2, 3]).long())
    for recipe in RECIPES:
        with pytest.raises(ConfigError, match="must be the number of tokens, 6, got 5"):
            GroupedLinear(2, 32, 16, recipe=recipe)(torch.randn(6, 32), ends_of([2, 3]))
        for ends in ([4, 2, 6], [-1, 2, 6]):
            with pytest.raises(ConfigError, match=r"must not decrease; got \[.*, 2, 6\]"):
                GroupedLinear(3, 32, 16, recipe=recipe)(torch.randn(6, 32), torch.tensor(ends).int())


def test_codes_without_scales_are_not_multiplied_as_values():
    layer, x, ends = GroupedLinear(2, 32, 16), torch.randn(6, 32), ends_of([4, 2])
    codes = layer.weight.detach().to(torch.float8_e4m3fn)
    for recipe in ("folded", "bf16"):
        with pytest.raises(ConfigError, match="float8_e4m3fn: FP8 products take"):
            grouped_linear(x, codes, ends, recipe)
    with pytest.raises(ConfigError, match="float8_e4m3fn: FP8 products take"):
        layer.multiply(x, codes, ends)


@pytest.mark.parametrize("strict", [True, False])
def test_codes_without_scales_are_not_loaded_as_values(strict):
    layer = GroupedLinear(2, 32, 16)
    before = layer.weight.detach().clone()
    given = {"weight": torch.full((2, 16, 32), 416.0).to(torch.float8_e4m3fn), "weight_scale": torch.ones(2, 16)}
    with pytest.raises(RuntimeError, match="float8_e4m3fn without a scale"):
        layer.load_state_dict(given, strict=strict)
    layer.load_state_dict({"weight": before.bfloat16()})
    assert torch.equal(layer.weight, before.bfloat16().float())


@pytest.mark.parametrize("recipe", ["tensorwise", "block", "delayed"])
def test_recipes_that_cannot_be_grouped_name_those_that_can(recipe):
    with pytest.raises(
        UnsupportedError,
        match=rf"'{load(recipe).name}': its fprop has .* folded, folded_fast, rotated, rowwise and bf16",
    ):
        GroupedLinear(2, 32, 32, recipe=recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[300, 0, 17, 1, 0], [4096, 1, 333], [128] * 4], ids=str)
@every_recipe
def test_on_a_gpu_it_computes_what_the_cpu_computes(recipe, counts):
    layer, ends = GroupedLinear(len(counts), 256, 384, recipe=recipe).bfloat16(), ends_of(counts)
    x = tokens(counts, 256).detach().bfloat16().requires_grad_()
    twin, twin_x = copy.deepcopy(layer).cuda(), x.detach().cuda().requires_grad_()
    y = layer(x, ends)
    dy = torch.randn_like(y)
    y.backward(dy)
    with record() as ledger:
        twin_y = twin(twin_x, ends.cuda())
        twin_y.backward(dy.cuda())
    assert not ledger.fallbacks and set(ledger.gemms) <= {"grouped_gemm"}
    for ours, theirs in ((y, twin_y), (x.grad, twin_x.grad), (layer.weight.grad, twin.weight.grad)):
        assert sqnr_db(ours, theirs.cpu()) > 45
