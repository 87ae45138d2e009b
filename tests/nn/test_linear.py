"""`Linear` is an `nn.Linear` to everybody else, and quantises its weight in every forward."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import octavo.nn
from octavo import kernels
from octavo.errors import ConfigError
from octavo.nn import Linear, functional
from octavo.numerics import format_named, sqnr_db
from octavo.recipes import kept_for_backward, load, mx
from octavo.tensor import FP8Tensor

PRESETS = ["folded", "rowwise", "tensorwise", "delayed", "just_in_time", "block", "mxfp8", "bf16"]
every_preset = pytest.mark.parametrize("recipe", PRESETS)


def fresh(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return what the layer must give for its weight as it is now."""
    return functional.linear(x, layer.weight.detach().clone(), layer.bias, layer.recipe)


def test_public_names_are_what_they_say():
    assert isinstance(octavo.nn.Linear, type)
    for name in octavo.nn.__all__:
        assert callable(getattr(octavo.nn, name)), f"octavo.nn.{name} is hidden by the module of that name"


@every_preset
def test_forward_and_gradients_are_those_of_the_function(recipe):
    layer = Linear(40, 24, recipe=recipe)
    x = torch.randn(3, 7, 40, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    twin_x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, layer.weight, layer.bias))
    twin = functional.linear(twin_x, weight, bias, load(recipe))
    twin.square().sum().backward()
    for one, other in (
        (y, twin),
        (x.grad, twin_x.grad),
        (layer.weight.grad, weight.grad),
        (layer.bias.grad, bias.grad),
    ):
        assert torch.equal(one, other)


@every_preset
def test_it_keeps_for_backward_what_the_recipe_says(recipe):
    layer, saved = Linear(256, 384, bias=False, recipe=recipe), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        layer(torch.randn(128, 256, requires_grad=True))
    codes = {tuple(tensor.shape) for tensor in saved if tensor.dtype == torch.float8_e4m3fn}
    of_input, of_weight = kept_for_backward(load(recipe))
    assert ({(128, 256), (256, 128)} & codes != set()) == ("codes" in of_input)
    assert ((384, 256) in codes) == ("codes" in of_weight)
    assert any(tensor.data_ptr() == layer.weight.data_ptr() for tensor in saved) == (of_weight == "the weight itself")


@pytest.mark.parametrize(
    ("forward", "gradient", "fprop", "dgrad"),
    [("e4m3", "e5m2", 28, 24), ("e2m3", "e3m2", 28, 24), ("e3m2", "e3m2", 22, 22), ("e2m1", "e2m1", 15, 15)],
)
def test_mx_computes_with_each_of_its_formats(forward, gradient, fprop, dgrad):
    x, weight = torch.randn(64, 128, requires_grad=True), (torch.randn(96, 128) / 11).requires_grad_()
    exact, y = x @ weight.t(), functional.linear(x, weight, None, mx(forward, gradient))
    grad_output = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, (x, weight), grad_output) for out in (y, exact))
    assert 0 < sqnr_db(exact, y) - fprop < 1.2
    assert all(0 < sqnr_db(one, other) - dgrad < 1.2 for one, other in zip(wanted, found, strict=True))
    steps = kernels.quantize(x.detach(), forward, "1x32")
    codes = steps.codes.float().abs() / format_named(forward).smallest_subnormal
    assert torch.equal(codes, codes.round()) and codes.max() <= 2 ** (2 ** format_named(forward).exponent_bits + 3)


def test_the_same_arguments_as_nn_linear():
    torch.manual_seed(1)
    ours = Linear(8, 4, False, "cpu", torch.float64, recipe="rowwise")
    torch.manual_seed(1)
    theirs = nn.Linear(8, 4, False, "cpu", torch.float64)
    assert torch.equal(ours.weight, theirs.weight) and ours.bias is None
    assert isinstance(ours, nn.Linear)
    assert ours.recipe == load("rowwise")
    with pytest.raises(ConfigError, match=r"unknown recipe 'rowise'\. Did you mean 'rowwise'\?"):
        Linear(8, 4, recipe="rowise")


def test_print_shows_the_recipe():
    layer = Linear(8, 4, recipe="block")
    assert repr(layer) == "Linear(in_features=8, out_features=4, bias=True, recipe=block)"
    layer.enabled = False
    assert repr(layer).endswith("recipe=block, disabled)")


@every_preset
def test_disabled_is_nn_linear_bit_for_bit(recipe):
    layer = Linear(40, 24, recipe=recipe)
    plain = nn.Linear(40, 24)
    plain.load_state_dict(layer.state_dict())
    layer.enabled = False
    x = torch.randn(5, 40)
    with kernels.record() as ledger:
        assert torch.equal(layer(x), plain(x))
    assert not ledger.gemms


def test_disabled_reads_a_parametrized_weight_once():
    layer = Linear(16, 8)
    spectral_norm(layer)
    plain = spectral_norm(nn.Linear(16, 8))
    plain.load_state_dict(layer.state_dict())
    layer.enabled = False
    x = torch.randn(5, 16)
    assert torch.equal(layer(x), plain(x))
    for name, value in plain.state_dict().items():  # each read is a step of the power iteration
        assert torch.equal(layer.state_dict()[name], value)


# --- the weight of now -----------------------------------------------------------------------------------------------


def load_other(layer: Linear) -> None:
    layer.load_state_dict(Linear(40, 24).state_dict())


def load_by_assignment(layer: Linear) -> None:
    layer.load_state_dict(Linear(40, 24).state_dict(), assign=True)


def new_parameter(layer: Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(24, 40))


def in_place(layer: Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2.0)


def one_element(layer: Linear) -> None:
    with torch.no_grad():
        layer.weight[3, 5] = 100.0


def through_a_view(layer: Linear) -> None:
    layer.weight.detach()[0].zero_()


def initialised(layer: Linear) -> None:
    nn.init.normal_(layer.weight)


def another_dtype(layer: Linear) -> None:
    layer.to(torch.bfloat16).to(torch.float32)


def other_data(layer: Linear) -> None:
    layer.weight.data = torch.randn(24, 40)


def another_recipe(layer: Linear) -> None:
    layer.recipe = load("block")


def behind_autograd(layer: Linear) -> None:
    layer.weight.data.mul_(3.0)  # moves no counter


@pytest.mark.parametrize(
    "change",
    [
        load_other,
        load_by_assignment,
        new_parameter,
        in_place,
        one_element,
        through_a_view,
        initialised,
        another_dtype,
        other_data,
        another_recipe,
        behind_autograd,
    ],
)
def test_every_change_of_the_weight_makes_new_codes(change):
    layer = Linear(40, 24)
    x = torch.randn(5, 40, requires_grad=True)
    layer(x)
    change(layer)
    y = layer(x)
    assert torch.equal(y, fresh(layer, x))
    y.sum().backward()


def test_another_parameter_in_the_same_memory_is_another_weight():
    # A freed parameter's memory goes to the next one, whose version counter starts at 0 again. Here that is no
    # accident.
    memory = np.random.default_rng(0).normal(size=(24, 40)).astype(np.float32)
    layer = Linear(40, 24)
    x = torch.randn(5, 40)
    layer.weight = nn.Parameter(torch.from_numpy(memory))
    layer(x)
    memory[:] = np.random.default_rng(1).normal(size=(24, 40))
    layer.weight = nn.Parameter(torch.from_numpy(memory))
    assert torch.equal(layer(x), fresh(layer, x))


def test_functional_call_uses_the_weight_it_is_given():
    memory = np.zeros((24, 40), np.float32)
    layer = Linear(40, 24)
    x = torch.randn(5, 40)
    for seed in (0, 1):
        memory[:] = np.random.default_rng(seed).normal(size=(24, 40))
        weight = torch.from_numpy(memory).view(24, 40)
        expected = functional.linear(x, weight.clone(), layer.bias, layer.recipe)
        assert torch.equal(torch.func.functional_call(layer, {"weight": torch.from_numpy(memory)}, (x,)), expected)


def test_every_forward_quantises_each_weight_once_and_backward_none():
    model = nn.Sequential(Linear(40, 24), nn.ReLU(), Linear(24, 8).requires_grad_(False))
    for grad in (True, True, False):
        with kernels.record() as ledger, torch.set_grad_enabled(grad):
            y = model(torch.randn(5, 40))
            assert ledger.weights == 2
            if grad:
                y.sum().backward()
        assert ledger.weights == 2


def test_inference_mode():
    with torch.inference_mode():
        layer = Linear(40, 24)
        x = torch.randn(5, 40)
        first = layer(x)
        layer.weight.mul_(2.0)
        assert torch.equal(layer(x), fresh(layer, x))
        assert not torch.equal(layer(x), first)
    trained = Linear(40, 24)
    with torch.inference_mode():
        trained(x)
    trained(x.clone().requires_grad_()).sum().backward()  # codes made in inference mode must not stop a backward
    assert trained.weight.grad is not None


# --- training -------------------------------------------------------------------------------------------------------


@every_preset
def test_autocast_over_an_fp32_master(recipe):
    layer = Linear(40, 24, recipe=recipe)
    x = torch.randn(5, 40, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype) == (torch.float32,) * 3
    # The same by hand, without autocast: results in BF16, codes from the FP32 input, which is never rounded twice.
    wide = x.detach().requires_grad_()
    expected = functional.linear(wide, layer.weight, layer.bias, load(recipe), dtype=torch.bfloat16)
    assert torch.equal(y, expected)
    dx, dw = torch.autograd.grad(expected.sum(), (wide, layer.weight))
    assert torch.equal(x.grad, dx)
    assert torch.equal(layer.weight.grad, dw)


def test_rule_4_under_autocast_an_input_is_rounded_once():
    # 17.01 is nearer to the code 18 than to 16; rounded to BF16 first it is 17, a tie, which goes to the even code 16.
    layer = Linear(32, 32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(32))
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 448.0, 17.01
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0, 1] == 18
        assert layer(x.bfloat16())[0, 1] == 16


def test_autocast_of_fp32_keeps_fp32_and_none_keeps_the_inputs_dtype():
    layer = Linear(40, 24)
    x = torch.randn(5, 40)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert layer(x).dtype == torch.float32
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@every_preset
def test_checkpointed_activations_give_the_same_gradients(recipe):
    model = nn.Sequential(Linear(40, 24, recipe=recipe), nn.ReLU(), Linear(24, 8, recipe=recipe))
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        x = torch.linspace(-1, 1, 200).reshape(5, 40).requires_grad_()
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_checkpointed_stochastic_rounding_draws_the_same_bits_again():
    recipe = load({"base": "rowwise", "fprop": {"input": {"rounding": "stochastic"}}})
    model = nn.Sequential(Linear(40, 24, recipe=recipe), nn.ReLU(), Linear(24, 8, recipe=recipe))
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(5)
        model.zero_grad()
        run(torch.ones(5, 40)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("recipe", "autocast"), [("folded", True), ("delayed", False), ("just_in_time", True), ("bf16", True)]
)
def test_compiled_is_bit_for_bit_eager(recipe, autocast):
    layer = Linear(40, 24, recipe=recipe)
    outcomes = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 200).reshape(5, 40).requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x)
        y.float().square().sum().backward()
        outcomes.append([y, x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    torch._dynamo.reset()


def test_compiled_code_follows_the_weight_without_compiling_again():
    layer = Linear(40, 24)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(5, 40)
    compiled(x).sum().backward()
    optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            y = compiled(x)
            assert torch.equal(y, fresh(layer, x))
            y.sum().backward()
            optimizer.step()
    torch._dynamo.reset()


def test_training_nears_what_fp32_training_reaches():
    target = torch.randn(8, 32)
    x = torch.randn(64, 32)
    losses = {}
    for kind in (nn.Linear, Linear):
        torch.manual_seed(1)
        layer = kind(32, 8)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
        for _ in range(250):
            loss = (layer(x) - x @ target.t()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = (layer(x) - x @ target.t()).square().mean().item() / (x @ target.t()).square().mean().item()
    assert losses[nn.Linear] < 1e-3
    assert losses[Linear] < 5e-3  # an exact weight, quantised, is 28.5 dB from its product: 1.4e-3; noise adds some


# --- to everybody else an nn.Linear ---------------------------------------------------------------------------------


def test_adopt_and_release_change_the_class_and_nothing_else():
    layer = nn.Linear(40, 24)
    layer.note = "mine"
    before = {**layer.__dict__}
    Linear.adopt(layer, load("block"))
    assert type(layer) is Linear and layer.recipe == load("block") and layer.enabled
    layer(torch.randn(5, 40))
    layer.release()
    assert type(layer) is nn.Linear
    assert layer.__dict__ == before


def test_a_copy_has_its_own_weight_and_no_codes_of_the_original():
    layer = Linear(40, 24, recipe="block")
    x = torch.randn(5, 40)
    expected = layer(x)
    twin = copy.deepcopy(layer)
    assert type(twin) is Linear and twin.recipe == layer.recipe
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(twin(x), expected)
    assert not (layer(x) - layer.bias).any()


def test_a_file_holds_no_codes():
    layer = Linear(256, 256)
    cold = len(pickle.dumps(layer))
    layer(torch.randn(5, 256, requires_grad=True))
    assert len(pickle.dumps(layer)) == cold


def test_state_dict_is_that_of_nn_linear_and_loads_both_ways():
    layer, plain = Linear(40, 24), nn.Linear(40, 24)
    layer(torch.randn(5, 40))
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain.weight, layer.weight)
    layer.load_state_dict(nn.Linear(40, 24).state_dict())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.named_buffers()) == []


@pytest.mark.gpu
@every_preset
def test_moving_to_a_gpu_makes_new_codes(recipe):
    layer = Linear(64, 32, recipe=recipe)
    x = torch.randn(5, 64)
    layer(x)
    layer.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x.cuda())
    assert y.is_cuda and y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.is_cuda and layer.weight.grad.dtype == torch.float32


@pytest.mark.gpu
@every_preset
def test_compiled_by_inductor_on_a_gpu_uses_the_same_codes(recipe):
    # Codes are bit for bit the same, so what is left is the order of sums, rounded to BF16.
    layer = Linear(256, 384, recipe=recipe, device="cuda")
    x = torch.randn(128, 256, device="cuda", requires_grad=True)
    outcomes = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        y.float().square().mean().backward()
        outcomes.append([y.float(), x.grad.clone(), layer.weight.grad.clone()])
    for one, other in zip(*outcomes, strict=True):
        assert float((one - other).norm() / one.norm()) < 2.0**-7
    torch._dynamo.reset()


@every_preset
def test_a_layer_without_inputs_gives_its_bias(recipe):
    layer = Linear(0, 5, recipe=recipe)
    x = torch.randn(3, 0, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(3, 5))
    y.sum().backward()
    assert layer.weight.grad.shape == (5, 0) and x.grad.shape == (3, 0)


@pytest.mark.parametrize("strict", [True, False])
def test_codes_without_a_scale_are_not_loaded_as_values(strict):
    """PyTorch copies codes of up to 448 into the weights; without `strict` the unexpected scale is not even named."""
    layer = octavo.nn.Linear(32, 32, bias=False)
    before = layer.weight.detach().clone()
    codes = torch.full((32, 32), 416.0).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="float8_e4m3fn without a scale"):
        layer.load_state_dict({"weight": codes, "weight_scale": torch.ones(32, 1)}, strict=strict)
    stored = octavo.nn.Linear(32, 32, bias=False)
    stored.weight = nn.Parameter(FP8Tensor.from_tensor(before))
    layer.load_state_dict(stored.state_dict())
    assert torch.equal(layer.weight, stored.weight.dequantize())
