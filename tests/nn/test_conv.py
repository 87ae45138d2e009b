"""FP8 convolutions: against float64, against the FP8 linear layer, and as the PyTorch layers they stand for."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import record
from octavo.kernels.patches import unfold
from octavo.nn import Conv1d, Conv2d, Linear
from octavo.nn.conv import window_of
from octavo.numerics import sqnr_db

FP8 = ["folded", "rowwise", "block", "tensorwise"]
SHAPES = [
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": (3, 2), "stride": (2, 3), "padding": (0, 1)},
    {"kernel_size": (1, 4), "padding": "valid", "bias": False},
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()


@shapes
@pytest.mark.parametrize("recipe", [*FP8, "bf16"])
def test_against_float64(recipe, shape):
    layer, x = Conv2d(40, 48, recipe=recipe, **shape), images(2, 40, 9, 8)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact, exact_x = nn.Conv2d(40, 48, **shape).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    exact_y = exact(exact_x)
    exact_y.backward(dy.double())
    least = 27.0 if recipe != "tensorwise" else 23.0  # its gradients have two mantissa bits
    assert y.shape == exact_y.shape and sqnr_db(exact_y, y) > 27.0
    assert sqnr_db(exact_x.grad, x.grad) > least
    assert sqnr_db(exact.weight.grad, layer.weight.grad) > least
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, exact.bias.grad.float())


@pytest.mark.parametrize("recipe", FP8)
def test_it_is_the_linear_layer_of_the_patches(recipe):
    layer, x = Conv2d(40, 48, 3, stride=2, padding=1, recipe=recipe), images(2, 40, 9, 8)
    linear = Linear(360, 48, recipe=recipe)
    linear.weight.data = layer.weight.detach().movedim(1, -1).flatten(1)
    linear.bias.data = layer.bias.detach()
    twin_x = x.detach().clone().requires_grad_()
    y, twin_y = layer(x), linear(unfold(twin_x.movedim(1, -1), window_of(layer)))
    assert torch.equal(y.movedim(1, -1).reshape(-1, 48), twin_y)
    dy = torch.randn_like(y)
    y.backward(dy)
    twin_y.backward(dy.movedim(1, -1).reshape(-1, 48))
    assert torch.equal(layer.weight.grad.movedim(1, -1).flatten(1), linear.weight.grad)
    torch.testing.assert_close(x.grad, twin_x.grad)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_in_high_precision_is_exact(gemm):
    recipe = {
        "dgrad": {"weight": {"granularity": "row"}},
        "wgrad": {"input": {"granularity": "row"}},
        gemm: {"precision": "bf16"},
    }
    layer, x = Conv2d(32, 40, 3, padding=1, recipe=recipe), images(1, 32, 6, 6)
    plain, plain_x = nn.Conv2d(32, 40, 3, padding=1), x.detach().clone().requires_grad_()
    plain.load_state_dict(layer.state_dict())
    y, plain_y = layer(x), plain(plain_x)
    dy = torch.randn_like(y)
    with record() as ledger:
        y.backward(dy)
    plain_y.backward(dy)
    pairs = {"fprop": (y, plain_y), "dgrad": (x.grad, plain_x.grad), "wgrad": (layer.weight.grad, plain.weight.grad)}
    for name, (ours, theirs) in pairs.items():
        assert torch.allclose(ours, theirs, atol=1e-4) == (name == gemm)
    assert sum(ledger.gemms.values()) == (2 if gemm == "fprop" else 1)


def test_channels_last_in_is_channels_last_out():
    layer = Conv2d(32, 40, 3)
    last, first = images(2, 32, 6, 5), torch.randn(2, 32, 6, 5)
    assert layer(last).is_contiguous(memory_format=torch.channels_last)
    assert layer(first).is_contiguous()
    assert torch.equal(layer(first), layer(first.to(memory_format=torch.channels_last)))
    layer.to(memory_format=torch.channels_last)
    layer(last).sum().backward()
    assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("recipe", ["folded", "rowwise_bf16_fprop"])
def test_the_result_can_be_written_to(recipe):
    layer, x = Conv2d(32, 40, 3, bias=False, recipe=recipe), images(2, 32, 6, 5)  # channels last: no copy is made
    found = []
    for activation in (nn.ReLU(), nn.ReLU(inplace=True)):
        y = activation(layer(x))
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kernel", [1, 3])
def test_backward_keeps_the_input_a_scale_per_patch_the_weight_and_its_codes(kernel):
    kept: list[torch.Tensor] = []
    layer, x = Conv2d(32, 40, kernel, bias=False), images(2, 32, 6, 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    *tensors, scale, codes, weight_scale = kept
    assert [t.data_ptr() for t in tensors] == [x.data_ptr(), layer.weight.data_ptr()]
    assert scale.shape == (2 * (7 - kernel) * (6 - kernel), 1)
    assert (codes.element_size(), codes.shape, weight_scale.shape) == (1, (40, 32 * kernel**2), (40, 1))
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.detach())
    assert [t.data_ptr() for t in kept[:2]] == [x.data_ptr(), layer.weight.data_ptr()] and len(kept) == 3


def test_the_weight_is_quantised_once_per_forward():
    layer = Conv2d(32, 40, 3)
    with record() as ledger:
        for _ in range(3):
            layer(images(1, 32, 5, 5)).sum().backward()
    assert ledger.weights == 3


def test_compiled_code_computes_the_same():
    layer, x = Conv2d(32, 40, 3, padding=1), images(2, 32, 6, 5)
    twin_x = x.detach().clone().requires_grad_()
    y, compiled = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")(twin_x)
    assert torch.equal(y, compiled) and y.stride() == compiled.stride()
    y.square().sum().backward()
    gradient = layer.weight.grad.clone()
    layer.weight.grad = None
    compiled.square().sum().backward()
    assert torch.equal(gradient, layer.weight.grad) and torch.equal(x.grad, twin_x.grad)


def test_autocast_gives_its_dtype_and_the_gradients_of_the_parameters():
    layer, x = Conv2d(32, 40, 3), images(2, 32, 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{"padding": "same"}, {"stride": 2, "padding": 1}, {"dilation": 3}], ids=str)
def test_one_dimension(options):
    layer, x = Conv1d(32, 40, 3, **options), torch.randn(2, 32, 11, requires_grad=True)
    exact = nn.Conv1d(32, 40, 3, **options).double()
    exact.load_state_dict(layer.state_dict())
    y, exact_x = layer(x), x.detach().double().requires_grad_()
    exact_y = exact(exact_x)
    y.sum().backward()
    exact_y.sum().backward()
    assert y.shape == exact_y.shape and sqnr_db(exact_y, y) > 27.0
    assert sqnr_db(exact.weight.grad, layer.weight.grad) > 27.0 < sqnr_db(exact_x.grad, x.grad)
    assert torch.equal(layer(x[0]), layer(x)[0])


def test_no_images():
    layer, x = Conv2d(32, 40, 3, padding=1), images(0, 32, 6, 5)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 40, 6, 5) and not layer.weight.grad.any() and x.grad.shape == x.shape


def test_a_nan_poisons_the_patches_that_hold_it():
    x = images(2, 32, 8, 8).detach()
    clean = Conv2d(32, 40, 3, padding=1)
    poisoned = x.clone()
    poisoned[1, 5, 4, 4] = torch.nan
    y, z = clean(x), clean(poisoned)
    around = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    around[1, :, 3:6, 3:6] = True
    assert torch.isnan(z).equal(around.expand_as(z)) and torch.equal(y[~around.expand_as(y)], z[~around.expand_as(z)])


def test_images_that_do_not_fit():
    layer = Conv2d(32, 40, 5)
    with pytest.raises(ConfigError, match=r"takes 32 channels, got an input of shape \(1, 3, 8, 8\)"):
        layer(torch.randn(1, 3, 8, 8))
    with pytest.raises(ConfigError, match="4 x 8 pixels are smaller than the kernel"):
        layer(torch.randn(1, 32, 4, 8))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"groups": 2}, "2 groups"),
        ({"padding_mode": "reflect", "padding": 1}, "padding_mode 'reflect'"),
        ({"kernel_size": 2, "padding": "same"}, "not the same on both sides"),
        ({"recipe": "delayed"}, "keeps scales from step to step"),
    ],
)
def test_what_stays_in_high_precision_says_why(options, why):
    with pytest.raises(UnsupportedError, match=why):
        Conv2d(32, 32, **{"kernel_size": 3, **options})


# --- in a model -----------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 40, 3, padding=1),
        nn.Conv2d(40, 40, 3, groups=40),
        nn.ConvTranspose2d(40, 40, 2),
        nn.Conv2d(40, 48, 1),
        nn.Flatten(),
        nn.Linear(48 * 25, 32),
    )


def test_conversion_and_back():
    net, x = model(), torch.randn(2, 3, 8, 8)
    before, state, names = net(x), copy.deepcopy(net.state_dict()), [type(layer) for layer in net]
    plan = octavo.convert(net)
    assert [row.is_fp8 for row in plan.layers] == [False, True, False, False, True, True]
    assert [row.kind for row in plan.layers] == ["conv2d 3x3"] * 3 + ["convtranspose2d 2x2", "conv2d 1x1", "linear"]
    assert plan.layers[1].shape == (40, 288) and plan.layers[2].shape == (40, 9)
    reasons = [row.reason for row in plan.layers]
    assert "fewer than 32 channels" in reasons[0] and "40 groups" in reasons[2] and "ConvTranspose2d" in reasons[3]
    assert "3 of 6 layers in FP8" in str(plan) and "48 x 40, conv2d 1x1" in str(plan)
    after = net(x)
    assert 20 < sqnr_db(before, after) < 60
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
    with octavo.disabled(net):
        assert torch.equal(net(x), before)
    torch.save(net, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), after)
    assert octavo.revert(net) == 3 and [type(layer) for layer in net] == names and torch.equal(net(x), before)


class Named(nn.Conv2d):
    """A class of a library that computes as nn.Conv2d does."""


class Doubled(nn.Conv2d):
    def forward(self, input):
        return super().forward(2 * input)


class DoubledInside(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(2 * input, weight, bias)


class Mine(Conv2d):
    """A subclass of Octavo's own."""


def test_subclasses_are_converted_if_they_compute_as_their_base():
    x, named = torch.randn(2, 32, 8, 8), Named(32, 32, 3)
    plain = nn.Conv2d(32, 32, 3)
    plain.load_state_dict(named.state_dict())
    computed = nn.utils.parametrizations.weight_norm(nn.Conv2d(32, 32, 3))
    net = nn.Sequential(named, Doubled(32, 32, 3), DoubledInside(32, 32, 3), Mine(32, 32, 3), computed)
    for plan in (octavo.convert(net), octavo.convert(net)):
        assert [row.is_fp8 for row in plan.layers] == [True, False, False, False, False]
        reasons = [row.reason for row in plan.layers[1:]]
        assert all("forward of its own" in reason for reason in reasons[:2])
        assert "Mine is a subclass of octavo.nn.Conv2d" in reasons[2] and "is computed" in reasons[3]
    octavo.convert(plain)
    assert isinstance(named, Named) and torch.equal(named(x), plain(x))
    torch.save(named, file := io.BytesIO())
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert isinstance(twin, Named) and torch.equal(twin(x), plain(x))
    assert octavo.revert(net) == 1 and type(named) is Named and type(net[3]) is Mine


def test_a_policy_without_convolutions_and_a_recipe_that_they_do_not_have():
    plan = octavo.plan(model(), policy=octavo.Policy(convolutions=False))
    assert [row.name for row in plan.layers if row.is_fp8] == ["6"]
    assert "leaves convolutions alone" in plan.layers[1].reason
    plan = octavo.plan(model(), "delayed")
    assert [row.name for row in plan.layers if row.is_fp8] == ["6"]
    assert "only linear layers" in plan.layers[1].reason


def test_a_converted_model_learns():
    net = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1)).to(
        memory_format=torch.channels_last
    )
    octavo.convert(net)
    optimizer, x, target = torch.optim.AdamW(net.parameters(), 1e-2), images(2, 32, 8, 8).detach(), images(2, 32, 8, 8)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(net(x), target.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FP8)
@shapes
def test_on_a_gpu_it_computes_what_the_cpu_computes(recipe, shape):
    layer, x = Conv2d(64, 48, recipe=recipe, **shape).bfloat16(), images(2, 64, 9, 8).detach().bfloat16()
    y = layer(x.requires_grad_())
    dy = torch.randn_like(y)
    y.backward(dy)
    twin, twin_x = copy.deepcopy(layer).cuda(), x.detach().cuda().requires_grad_()
    twin.zero_grad()
    with record() as ledger:
        twin(twin_x).backward(dy.cuda())
    assert not ledger.fallbacks
    assert sqnr_db(x.grad, twin_x.grad.cpu()) > 40 and sqnr_db(layer.weight.grad, twin.weight.grad.cpu()) > 40
    assert sqnr_db(y, twin(twin_x).cpu()) > 40
