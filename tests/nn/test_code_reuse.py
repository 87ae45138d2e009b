"""Weight codes that are made once for a block of code."""

import copy
import itertools

import pytest
import torch
from torch import nn

import octavo
from octavo import Policy, kernels
from octavo.nn import Linear, reuse_weight_codes
from octavo.numerics import E4M3, PER_ROW, quantize
from octavo.recipes import load
from writes import net, results

EAGER_AND_COMPILED = [*itertools.product(("folded", "rowwise", "tensorwise", "block"), [False]), ("folded", True)]


@pytest.mark.parametrize(("recipe", "compiled"), EAGER_AND_COMPILED)
def test_reused_codes_give_the_same_results_and_are_made_once(recipe, compiled):
    torch._dynamo.reset()
    model = net(recipe)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    expected = results(model, call)
    with kernels.record() as ledger, reuse_weight_codes(model):
        assert ledger.weights == 3
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(results(model, call), expected, strict=True))
            with torch.no_grad():
                assert torch.equal(call(torch.ones(5, 32)), net(recipe)(torch.ones(5, 32)))
    made = ledger.weights
    assert made == 3 + 2 * 3  # and those of `net`
    assert all(layer.weight_codes is None for layer in model.children())
    assert all(torch.equal(a, b) for a, b in zip(results(model, call), expected, strict=True))


def test_codes_of_layers_that_are_computed_together_are_on_the_first():
    model = net("folded")
    with reuse_weight_codes(model):
        codes = model.q.weight_codes
        assert codes.rows == (48, 16)
        expected = quantize(torch.cat([model.q.weight, model.k.weight]).detach(), E4M3, PER_ROW, "power_of_two")
        assert torch.equal(codes.stack.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(codes.stack.scale, expected.scale) and codes.stack.granularity == expected.granularity
        assert model.k.weight_codes is None and model.out.weight_codes.rows == (32,)


def test_a_layer_of_a_group_computes_alone_without_them():
    model, x = net("folded"), torch.randn(5, 32)
    expected = model.k(x.clone()), model.q(x.clone())
    with reuse_weight_codes(model):
        assert torch.equal(model.k(x.clone()), expected[0]) and torch.equal(model.q(x.clone()), expected[1])
        model.k.enabled = False
        assert torch.equal(model.q(x.clone()), expected[1])


def test_a_write_inside_the_block_is_seen_after_it():
    model, x = net("folded"), torch.randn(5, 32)
    before = model(x.clone())
    with reuse_weight_codes(model):
        for p in model.parameters():
            p.data.mul_(3.0)
        assert torch.equal(model.out(torch.ones(1, 48)), net("folded").out(torch.ones(1, 48)))
    assert torch.equal(model(x.clone()), net("folded", values=model)(x.clone()))
    assert not torch.equal(model(x.clone()), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_backward_reads_the_reused_codes_too(recipe, dtype):
    """Also where codes of a second set would follow from the weights and their scales."""
    layer, x = Linear(64, 48, dtype=dtype, recipe=recipe), torch.randn(5, 64, dtype=dtype)

    def gradient():
        leaf = x.clone().requires_grad_()
        layer(leaf).float().square().sum().backward()
        return leaf.grad

    before = gradient()
    with reuse_weight_codes(layer):
        assert torch.equal(gradient(), before)
        layer.weight.data.mul_(-3.0)
        assert torch.equal(gradient(), before)
    assert not torch.equal(gradient(), before)


def test_codes_of_a_group_are_not_read_by_one_layer_nor_those_of_one_by_a_group():
    model, x = net("folded"), torch.randn(5, 32)
    expected = model(x.clone())
    with reuse_weight_codes(model.q):  # k, which is computed with it, is not in the block
        assert torch.equal(model(x.clone()), expected)
    with reuse_weight_codes(model):
        alone = Linear.forward(model.q, x.clone())
        model.q.shared = None
        assert torch.equal(model.q(x.clone()), alone)


def test_an_mlp_reuses_codes_also_where_somebody_looks_in(make_mlp):
    model, x = make_mlp(), torch.randn(5, 32)
    octavo.convert(model, "folded", policy=Policy(min_gain=0.0))
    expected = results(model, model)
    with reuse_weight_codes(model):
        with kernels.record() as ledger:
            assert all(torch.equal(a, b) for a, b in zip(results(model, model), expected, strict=True))
        assert ledger.weights == 0
        model.gate.register_forward_hook(lambda *_: None)  # now each layer computes by itself
        alone = model(x)
    assert torch.equal(alone, model(x))


def test_a_copy_of_a_model_has_codes_of_its_own():
    model, x = net("folded"), torch.randn(5, 32)
    with reuse_weight_codes(model):
        other = copy.deepcopy(model)
        assert all(layer.weight_codes is None for layer in other.children())
        assert "weight_codes" in model.q.__dict__
    for p in other.parameters():
        p.data.mul_(3.0)
    assert torch.equal(other(x.clone()), net("folded", values=other)(x.clone()))


def test_the_block_ends_with_an_error_too():
    model = net("folded")
    with pytest.raises(RuntimeError, match="mine"), reuse_weight_codes(model):
        raise RuntimeError("mine")
    assert all(layer.weight_codes is None for layer in model.children())


def test_blocks_may_be_nested():
    model = net("folded")
    with reuse_weight_codes(model):
        with reuse_weight_codes(model.out):
            model(torch.randn(5, 32))
        with kernels.record() as ledger:
            model(torch.randn(5, 32))
        assert ledger.weights == 0
    assert all(layer.weight_codes is None for layer in model.children())


def test_layers_that_have_no_codes_to_reuse_are_left_as_they_are():
    stochastic = load({"base": "rowwise", "name": "mine", "fprop": {"weight": {"rounding": "stochastic"}}})
    layers = nn.ModuleDict({"bf16": Linear(32, 32, recipe="bf16"), "random": Linear(32, 32, recipe=stochastic)})
    codes = nn.Linear(32, 32)
    octavo.convert(codes, "folded", policy=Policy(min_gain=0.0, weights="fp8"))
    layers["codes"] = codes
    with reuse_weight_codes(layers):
        assert all(getattr(layer, "weight_codes", None) is None for layer in layers.values())
