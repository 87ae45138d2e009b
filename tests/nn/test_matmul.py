"""Products of two activations: each of a batch is a linear layer whose weight is the right operand, transposed."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError
from octavo.nn.functional import linear
from octavo.nn.matmul import matmul, quantize_batch_both_ways
from octavo.numerics import sqnr_db
from octavo.recipes import QuantSpec, load

RECIPES = ("folded", "rowwise", "block", "tensorwise", "bf16", "rowwise_bf16_fprop", "rowwise_bf16_wgrad")


def gradients(function, a, b, dy):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    y = function(a, b)
    y.backward(dy)
    return y.detach(), a.grad, b.grad


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [48, 128])
def test_each_of_a_batch_is_a_linear_layer_bit_for_bit(name, rows):
    recipe = load(name)
    a, b, dy = torch.randn(3, rows, 64), torch.randn(3, 64, 80), torch.randn(3, rows, 80)
    found = gradients(lambda a, b: matmul(a, b, recipe), a, b, dy)
    for i in range(3):
        one = gradients(lambda a, b: linear(a, b.t(), None, recipe), a[i], b[i], dy[i])
        for name_of, x, expected in zip(("c", "da", "db"), found, one, strict=True):
            assert torch.equal(x[i], expected), name_of


@pytest.mark.parametrize(
    "shapes", [((40, 64), (64, 48)), ((2, 3, 32, 64), (3, 64, 48)), ((5, 32, 64), (64, 48))], ids=str
)
@pytest.mark.parametrize("name", ["folded", "rowwise", "block"])
def test_values_against_float64(shapes, name):
    a, b = map(torch.randn, shapes)
    dy = torch.randn(torch.matmul(a, b).shape)
    exact = gradients(torch.matmul, a.double(), b.double(), dy.double())
    found = gradients(lambda a, b: matmul(a, b, load(name)), a, b, dy)
    assert [x.shape for x in found] == [x.shape for x in exact]
    assert min(sqnr_db(x, y) for x, y in zip(exact, found, strict=True)) >= 27


@pytest.mark.parametrize(
    "shapes",
    [((2, 16), (16,)), ((16,), (2, 16, 3)), ((4, 16), (8, 5)), ((2, 4, 16), (2, 8, 5)), ((), (16, 3))],
    ids=str,
)
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ConfigError, match=r"takes a \(\.\.\., M, K\) and b \(\.\.\., K, N\), got \("):
        matmul(*map(torch.randn, shapes), load("folded"))


def test_dtypes():
    a, b = torch.randn(2, 32, 64), torch.randn(2, 64, 32).bfloat16()
    y, da, db = gradients(lambda a, b: matmul(a, b, load("folded"), torch.bfloat16), a, b, torch.ones(2, 32, 32))
    assert (y.dtype, da.dtype, db.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)], ids=str)
def test_only_needed_gradients_are_computed(needed):
    a, b = torch.randn(2, 32, 64, requires_grad=needed[0]), torch.randn(2, 64, 32, requires_grad=needed[1])
    with kernels.record() as ledger:
        y = matmul(a, b, load("folded"))
        if y.requires_grad:
            y.sum().backward()
    assert sum(ledger.gemms.values()) == 2 * (1 + sum(needed))
    assert (a.grad is not None, b.grad is not None) == needed


def test_codes_are_kept_and_not_the_operands():
    a, b = torch.randn(2, 32, 64, requires_grad=True), torch.randn(2, 64, 48, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        matmul(a, b, load("folded"))
    assert sorted(x.shape for x in saved if x.dtype == torch.float8_e4m3fn) == [(2, 32, 64), (2, 48, 64)]
    assert all(x.numel() <= 2 * 64 for x in saved if x.dtype == torch.float32)


@pytest.mark.parametrize(
    "shapes", [((0, 32, 64), (0, 64, 32)), ((2, 0, 64), (2, 64, 32)), ((2, 32, 0), (2, 0, 32))], ids=str
)
def test_empty(shapes):
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    y = matmul(a, b, load("folded"))
    y.sum().backward()
    assert torch.equal(y, torch.bmm(a, b)) and a.grad.shape == a.shape and b.grad.shape == b.shape


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)], ids=str)
def test_stochastic_rounding_has_scales_of_its_own_for_each_matrix(sides):
    x = torch.randn(2, 8, 16) * torch.tensor([1.0, 100.0])[:, None, None]
    target = QuantSpec("e4m3", "row", "power_of_two", "stochastic")
    operands = [target if side else None for side in sides]
    for batch, asked, source in zip(quantize_batch_both_ways(x, *operands), sides, (x, x.mT), strict=True):
        assert (batch is None) == (not asked)
        if batch is not None:
            assert batch.codes.shape == source.shape
            assert ((batch.codes.float() * batch.scale - source).abs() <= source.abs() / 8 + batch.scale / 512).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["folded", "rowwise", "block", "tensorwise"])
def test_on_a_gpu_as_on_a_cpu(name):
    recipe = load(name)
    a, b, dy = torch.randn(3, 128, 256), torch.randn(3, 256, 384), torch.randn(3, 128, 384)
    expected = gradients(lambda a, b: matmul(a, b, recipe), a, b, dy)
    with kernels.record() as ledger:
        found = gradients(lambda a, b: matmul(a, b, recipe), a.cuda(), b.cuda(), dy.cuda())
    assert not ledger.fallbacks and "reference" not in ledger.gemms
    assert min(sqnr_db(x, y.cpu()) for x, y in zip(expected, found, strict=True)) > 45  # BF16 rounding, and its codes
