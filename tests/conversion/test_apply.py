"""Converting changes how linear layers compute, and nothing that anybody else holds on to."""

import copy
import functools
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels
from octavo.conversion import Policy, convert, disabled, enable, layer_planner, make_plan, planner, revert
from octavo.errors import ConfigError, NonFiniteError, UnsupportedError
from octavo.kernels.gemm import choose
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.kernels.runtime import dispatch
from octavo.kernels.runtime.devices import architecture_of
from octavo.lab.models import ModelConfig, build
from octavo.nn import GroupedLinear, Linear
from octavo.nn.adopted import Adopted
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.experts import ExpertLinear, Experts
from octavo.nn.scaling_state import ScalingState, scales
from octavo.nn.shared import SharedInput
from octavo.recipes import load

TOKENS = torch.arange(24).reshape(2, 12) * 3


def fp8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Linear)]


def test_the_layers_of_the_plan_are_converted_and_no_others(model, converted):
    plan = convert(model, "folded")
    assert fp8(model) == converted == list(plan.recipes)
    assert type(model.lm_head) is nn.Linear
    with kernels.record() as ledger:
        model(TOKENS).sum().backward()
    assert ledger.gemms == {"reference" if cpu_unsupported_reason() else "scaled_mm.row": 12}


def test_the_plan_returned_is_the_one_that_make_plan_gives(model):
    expected = str(make_plan(model, "block"))
    assert str(convert(model, "block")) == expected


def test_the_functions_are_on_top_of_the_package():
    assert octavo.convert is convert and octavo.revert is revert and octavo.disabled is disabled
    assert octavo.plan is make_plan


def test_everything_attached_to_a_layer_survives_both_ways(model):
    layer = model.layers[0].up
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_hook(lambda _: seen.append("weight"))
    layer.note, layer.weight.note = "mine", "its"
    model.layers[1].down.weight.requires_grad_(False)
    model.eval()
    model.layers[1].train()
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    flags = {name: module.training for name, module in modules.items()}
    state = model.state_dict()

    def unchanged() -> None:
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
        assert {name: id(m) for name, m in model.named_modules()} == {name: id(m) for name, m in modules.items()}
        assert {name: m.training for name, m in model.named_modules()} == flags
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
        assert model.lm_head.weight is model.embed.weight
        assert model.again is model.layers[0].up
        assert (layer.note, layer.weight.note) == ("mine", "its")
        assert not model.layers[1].down.weight.requires_grad
        seen.clear()
        model(TOKENS).sum().backward()
        assert seen == ["pre", "forward", "weight", "backward"] or seen == ["pre", "forward", "backward", "weight"]

    unchanged()
    convert(model)
    unchanged()
    revert(model)
    unchanged()


def test_an_optimizer_made_before_keeps_training_it(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    before = model.layers[0].up.weight.clone()
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].up.weight, before)


def test_revert_gives_back_the_model_that_was(model, converted):
    expected = model(TOKENS)
    modules = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    convert(model)
    assert not torch.equal(model(TOKENS), expected)
    assert revert(model) == len(converted)
    assert {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()} == modules
    assert torch.equal(model(TOKENS), expected)
    assert revert(model) == 0


def test_tied_linear_layers_stay_tied_and_both_gradients_arrive():
    model = nn.ModuleDict({"one": nn.Linear(64, 64, bias=False), "two": nn.Linear(64, 64, bias=False)})
    model.two.weight = model.one.weight
    convert(model)
    assert model.one.weight is model.two.weight
    x = torch.randn(8, 64)
    alone = []
    for layer in (model.one, model.two):
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        alone.append(gradient)
    (model.one(x).square().sum() + model.two(x).square().sum()).backward()
    torch.testing.assert_close(model.one.weight.grad, alone[0] + alone[1])


def test_a_linear_layer_as_the_whole_model():
    layer = nn.Linear(64, 64)
    plan = convert(layer)
    assert type(layer) is Linear and plan.fp8_layers == 1
    with disabled(layer):
        assert not layer.enabled
    assert revert(layer) == 1 and type(layer) is nn.Linear


def test_state_dict_goes_between_converted_and_plain_models(model):
    convert(model)
    twin = type(model)()
    twin.load_state_dict(model.state_dict())
    model.load_state_dict(twin.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = type(model)()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (twin, loaded):
        assert other.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
        convert(other)
        assert torch.equal(other(TOKENS), model(TOKENS))


def test_a_copy_of_a_converted_model_is_converted(model, converted):
    convert(model)
    twin = copy.deepcopy(model)
    assert fp8(twin) == converted
    assert torch.equal(twin(TOKENS), model(TOKENS))
    assert twin.lm_head.weight is twin.embed.weight


def test_converting_twice_is_converting_once(model, converted):
    first = convert(model)
    y = model(TOKENS)
    assert str(convert(model)) == str(first)
    assert fp8(model) == converted
    assert torch.equal(model(TOKENS), y)


def test_converting_to_another_recipe(model, converted):
    convert(model, "tensorwise")
    convert(model, "block")
    assert all(model.get_submodule(name).recipe == load("block") for name in converted)
    once = type(model)()
    once.load_state_dict(model.state_dict())
    convert(once, "block")
    assert torch.equal(once(TOKENS), model(TOKENS))


def test_converting_to_bf16_turns_layers_back(model):
    convert(model)
    convert(model, "bf16")
    assert fp8(model) == []


def test_a_policy_that_keeps_a_converted_layer_turns_it_back(model, converted):
    convert(model, policy=Policy(keep_defaults=False))
    assert "lm_head" in fp8(model)
    convert(model)
    assert fp8(model) == converted


def test_subclasses_are_left_alone_and_the_plan_says_why():
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(Lora(64, 64), nn.Linear(64, 64))
    plan = convert(model)
    assert type(model[0]) is Lora and type(model[1]) is Linear
    assert plan.layers[0].reason == "Lora, a subclass of nn.Linear, computes more than a linear layer"


class Named(nn.Linear):
    """A class of a library, such as torchtitan's, that computes as nn.Linear does."""

    note = "mine"


def test_a_subclass_that_keeps_the_forward_is_converted_and_remains_what_it_was(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = nn.Sequential(Named(64, 64), nn.Linear(64, 64))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(8, 64)
    assert convert(model).fp8_layers == convert(plain).fp8_layers == 2
    assert isinstance(model[0], Named) and isinstance(model[0], Linear) and model[0].note == "mine"
    assert torch.equal(model(x), plain(x))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert isinstance(twin[0], Named) and twin[0].recipe == model[0].recipe and torch.equal(twin(x), plain(x))
    assert convert(model, "rowwise").fp8_layers == 2 and model[0].recipe.name == "rowwise"
    assert revert(model) == 2 and type(model[0]) is Named


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv1d(64, 64, 1)], ids=["linear", "convolution"])
def test_a_layer_whose_forward_was_set_stays_and_the_plan_says_why(layer):
    """As accelerate does: the new forward calls the bound method of before, which a change of class does not reach."""
    plain, model, x = copy.deepcopy(layer), nn.Sequential(layer, nn.Linear(64, 64)), torch.randn(64, 64)
    layer.forward = functools.partial(lambda own, x: 2 * own(x), layer.forward)
    plan = convert(model)
    assert [row.is_fp8 for row in plan.layers] == [False, True]
    assert plan.layers[0].reason == "its instance has a forward of its own, as hooks of other libraries set one"
    assert type(layer) is type(plain) and torch.equal(layer(x), 2 * plain(x))


def test_a_layer_whose_forward_was_set_after_the_conversion_stays_converted(model, converted):
    convert(model)
    layer = model.layers[0].up
    layer.forward = functools.partial(lambda own, x: own(x), layer.forward)
    plan = convert(model, "rowwise")
    assert [row.name for row in plan.layers if row.is_fp8] == converted and layer.recipe.name == "rowwise"


def test_a_weight_that_is_computed_stays_as_it_is():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    plan = convert(model)
    assert [layer.is_fp8 for layer in plan.layers] == [False, True]
    assert plan.layers[0].reason == "its weight is computed, by a parametrization for example"
    model(torch.randn(8, 64)).sum().backward()


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("again", [revert, convert])
@pytest.mark.parametrize(
    ("name", "parameter"), [("0", "weight"), ("0", "bias"), ("1", "weight"), ("2", "weight"), ("3", "weight")]
)
def test_what_was_parametrised_since_is_released_too(again, name, parameter):
    """PyTorch puts a class of its own in front of the module's, and later takes what is behind it for the original."""
    model = nn.Sequential(Named(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Conv1d(64, 64, 1))
    module, kind, x = model.get_submodule(name), type(model.get_submodule(name)), torch.randn(64, 64)
    convert(model)
    converted = type(module)
    assert converted is not kind
    nn.utils.parametrize.register_parametrization(module, parameter, Doubled())
    again(model)
    assert type(module).__mro__[1] is kind and not vars(module).keys() & set(converted.fields)
    plain = copy.deepcopy(model)
    revert(plain)
    assert torch.equal(module(x), plain.get_submodule(name)(x))
    nn.utils.parametrize.remove_parametrizations(module, parameter)
    assert type(module) is kind
    convert(model)
    assert type(module) is converted and model(x).isfinite().all()


@pytest.mark.parametrize("name", ["0", "1", "2", "3"])
def test_parametrizations_of_before_can_be_removed_from_a_converted_model(name):
    model = nn.Sequential(Named(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Conv1d(64, 64, 1))
    module, kind = model.get_submodule(name), type(model.get_submodule(name))
    nn.utils.parametrize.register_parametrization(module, "bias", Doubled())
    rows = {row.name: row for row in convert(model).layers}
    assert name == "1" or rows[name].reason == "one of its parameters is computed by a parametrization"
    nn.utils.parametrize.remove_parametrizations(module, "bias")
    assert type(module) is kind


def test_subclasses_of_our_own_layer_are_left_alone_too():
    class Mine(Linear):
        pass

    model = nn.Sequential(Mine(64, 64), nn.Linear(64, 64))
    convert(model)
    assert type(model[0]) is Mine
    convert(model, "bf16")
    revert(model)
    assert type(model[0]) is Mine


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_stops_it_before_anything_has_changed(model, value):
    with torch.no_grad():
        model.layers[1].down.weight[3, 5] = value
        model.layers[1].down.weight[4, 0] = value
    message = r"layers\.1\.down\.weight holds 2 value\(s\) that are NaN or infinite, the first at row 3, column 5"
    with pytest.raises(NonFiniteError, match=message):
        convert(model)
    assert fp8(model) == []


def test_a_weight_that_is_not_finite_stops_a_change_of_recipe_too(model, converted):
    convert(model, "folded")
    with torch.no_grad():
        model.layers[1].down.weight[3, 5] = torch.nan
    with pytest.raises(NonFiniteError):
        convert(model, "block")
    assert {model.get_submodule(name).recipe.name for name in converted} == {"folded"}


def test_a_layer_that_stays_in_bf16_may_hold_what_it_likes(model, converted):
    with torch.no_grad():
        model.layers[0].router.weight[0, 0] = torch.nan
    convert(model)
    assert fp8(model) == converted


def test_the_message_for_a_root_layer_names_its_weight():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^weight holds 1 value"):
        convert(layer)


@pytest.mark.parametrize("recipe", ["foldd", {"modules": {"nowhere.*": "bf16"}}], ids=str)
def test_a_wrong_recipe_changes_nothing(model, recipe):
    with pytest.raises(ConfigError):
        convert(model, recipe)
    assert fp8(model) == []


def test_a_model_on_the_meta_device_can_be_converted_and_filled_later():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    convert(model)
    model.to_empty(device="cpu")
    nn.init.normal_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert torch.equal(model(torch.zeros(2, 64)), torch.zeros(2, 64))


# --- disabled -------------------------------------------------------------------------------------------------------


def test_disabled_computes_as_before_the_conversion(model):
    expected = model(TOKENS)
    convert(model)
    converted_y = model(TOKENS)
    with disabled(model), kernels.record() as ledger:
        assert torch.equal(model(TOKENS), expected)
    assert not ledger.gemms
    assert torch.equal(model(TOKENS), converted_y)


def test_disabled_ends_when_an_exception_leaves_it(model):
    convert(model)
    with pytest.raises(ZeroDivisionError), disabled(model):
        raise ZeroDivisionError
    assert all(model.get_submodule(name).enabled for name in fp8(model))


def test_enable_switches_until_told_otherwise_and_says_what(model):
    convert(model)
    assert len(enable(model, False)) >= len(fp8(model)) and enable(model, False) == []
    with kernels.record() as ledger:
        model(TOKENS)
    assert not ledger.gemms
    assert len(enable(model)) >= len(fp8(model))
    with kernels.record() as ledger:
        model(TOKENS)
    assert ledger.gemms


def test_disabled_inside_disabled_ends_with_the_outer_one(model):
    convert(model)
    layer = model.layers[0].up
    with disabled(model):
        with disabled(model.layers[0]):
            assert not layer.enabled
        assert not layer.enabled
    assert layer.enabled


def test_disabled_blocks_of_two_threads_end_with_the_last_one(model):
    """The first to end must not bring FP8 back into the other."""
    convert(model)
    plain, fp8_result = copy.deepcopy(model), model(TOKENS)
    revert(plain)
    entered, ended = threading.Event(), threading.Event()

    def evaluate() -> torch.Tensor:
        with disabled(model):
            entered.set()
            assert ended.wait(60)
            return model(TOKENS)

    with ThreadPoolExecutor(1) as pool:
        with disabled(model):
            late = pool.submit(evaluate)
            assert entered.wait(60)
        ended.set()
        assert torch.equal(late.result(60), plain(TOKENS))
    assert torch.equal(model(TOKENS), fp8_result) and not torch.equal(fp8_result, plain(TOKENS))


def through_pickle(model):
    with io.BytesIO() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle])
@pytest.mark.parametrize("module", ["linear", "convolution", "experts", "attention", "norm"])
def test_a_copy_made_inside_disabled_is_in_fp8_after_it(module, duplicate):
    """As the model of which it is a copy; one that was off for good stays off."""
    if module == "linear":
        model = nn.Linear(64, 64)
    elif module == "convolution":
        model = nn.Conv2d(16, 32, 3)
    elif module == "experts":
        model = GroupedLinear(2, 64, 64)
    elif module == "attention":
        model = ScaledDotProduct(reader="wo")
    else:
        model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64))
    if module in ("linear", "convolution", "norm"):
        convert(model, policy=Policy(keep_defaults=False, min_features=16))
    if module == "norm":
        model = model[0]
    assert model.enabled
    with disabled(model):
        with disabled(model):
            inner = duplicate(model)
        outer = duplicate(model)
        assert not model.enabled
    assert model.enabled and inner.enabled and outer.enabled and duplicate(model).enabled
    enable(model, False)
    with disabled(model):
        off = duplicate(model)
    assert not (model.enabled or off.enabled or duplicate(model).enabled)


def test_disabled_leaves_alone_what_was_off_already(model):
    convert(model)
    model.layers[0].up.enabled = False
    with disabled(model):
        pass
    assert not model.layers[0].up.enabled


def test_disabled_of_a_plain_model_does_nothing(model):
    expected = model(TOKENS)
    with disabled(model):
        assert torch.equal(model(TOKENS), expected)


# --- strict, and devices without FP8 ----------------------------------------------------------------------------------


@pytest.fixture
def on(monkeypatch):
    """Plan as on another device: `on("hip", (9, 4))`; parameters stay where they are."""

    def planned(backend, capability):
        monkeypatch.setattr(dispatch, "_own_architecture", lambda device: architecture_of(backend, capability))
        monkeypatch.setitem(choose.__globals__, "_choices", {})
        monkeypatch.setattr(dispatch, "_own_rates", lambda device: None)
        monkeypatch.setattr(planner, "_device_of", lambda model: torch.device("xpu" if backend == "xpu" else "cuda:0"))
        monkeypatch.setattr(layer_planner, "gemm_kernel", lambda *_: ("scaled_mm.row", {}))
        dispatch._triton_unsupported_reason.cache_clear()

    yield planned
    dispatch._triton_unsupported_reason.cache_clear()


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        ("cuda", (8, 0), r"cuda:0 \(Ampere and older\) cannot train in FP8: no FP8 tensor cores"),
        ("hip", (9, 4), r"\(CDNA 3\).*FNUZ"),
        ("hip", (9, 5), r"\(CDNA 4\).*PTX"),
        ("xpu", (0, 0), r"xpu \(Intel GPU\).*XPU"),
    ],
)
def test_a_device_without_fp8_is_refused_unless_asked_for(model, on, backend, capability, reason):
    on(backend, capability)
    with pytest.raises(UnsupportedError, match=f"{reason}.*allow_reference=True"):
        convert(model)
    assert fp8(model) == []
    assert convert(model, allow_reference=True).allow_reference
    assert fp8(model)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_device_with_fp8_is_not_refused(model, on, capability):
    on("cuda", capability)
    convert(model)
    assert fp8(model)


def test_rule_7_a_fallback_is_refused_and_changes_nothing(model, on, monkeypatch):
    on("cuda", (9, 0))
    monkeypatch.setattr(layer_planner, "gemm_kernel", lambda *_: ("reference", {"scaled_mm.row": "E4M3 operands only"}))
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\.up: recipe 'folded' has no fast kernel on cuda:0 .*E4M3 ope"
    ):
        convert(model, "folded")
    assert fp8(model) == []
    convert(model, allow_reference=True)
    assert "layers.0.up" in fp8(model)


def test_strict_on_a_cpu_refuses_nothing(model, converted):
    convert(model, "block", strict=True)
    assert fp8(model) == converted


def test_weights_that_are_in_use_are_not_made_plain():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(model, policy=Policy(weights="fp8"))
    for p in model.parameters():
        p.requires_grad_(False)
    y = model(torch.randn(4, 64, requires_grad=True))
    with pytest.raises(ConfigError, match="in use"):
        revert(model)
    assert all(isinstance(layer, Linear) for layer in model), "nothing has changed"
    del y
    assert revert(model) == 2 and type(model[0].weight) is nn.Parameter


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("again", ["revert", "bf16"])
def test_what_fsdp2_has_wrapped_is_released_too(one_rank, again):
    model = build(ModelConfig(vocab=32, dim=64, layers=1, heads=2, ffn=128, sequence=16), 0)
    block, tokens = model.layers[0], torch.randint(32, (1, 16))
    expected = model(tokens)
    convert(model, policy=Policy(min_gain=0))
    wrapped = [block.feed_forward, block.attention.wo, block.attention_norm]
    for module in wrapped:
        fully_shard(module, mesh=one_rank)
    if again == "revert":
        assert revert(model) == 7
    else:
        convert(model, "bf16")
    with kernels.record() as ledger:
        assert torch.equal(model(tokens), expected)
    assert not ledger.gemms
    for module in wrapped:
        assert isinstance(module, FSDPModule) and not isinstance(module, Adopted)


def test_names_that_octavo_uses_may_be_a_users_attributes():
    class Own(nn.Module):
        prefix = "mine"

        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
            self.down_proj = nn.Linear(128, 64, bias=False)
            self.parent, self.fields, self.scaling_state = "a tree", "of wheat", "dynamic"

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    model = nn.Sequential(Own())
    convert(model, "delayed", policy=Policy(min_gain=0))
    assert scales(model) is not None
    assert revert(model) == 3 and type(model[0]) is Own
    assert (model[0].parent, model[0].fields, model[0].scaling_state, model[0].prefix) == (
        "a tree", "of wheat", "dynamic", "mine",
    )  # fmt: skip


def test_a_norm_whose_attributes_have_octavos_names_stays_the_users():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.target = nn.Parameter(torch.rand(64)), 1e-6, "of mine"

        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    model = nn.Sequential(Scaled(), nn.Linear(64, 128, bias=False))
    convert(model, "folded", policy=Policy(min_gain=0))
    assert type(model[0]) is Scaled and model[0].target == "of mine"
    del model[0].target
    convert(model, "folded", policy=Policy(min_gain=0))
    assert isinstance(model[0], Scaled) and type(model[0]) is not Scaled


# --- lifetime, and copies of parts ------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def small(recipe, architecture="llama"):
    shape = {"vocab": 96, "dim": 64, "layers": 2, "heads": 2, "ffn": 128, "sequence": 12, "experts": 4}
    model = build(ModelConfig(architecture=architecture, **shape), 0)
    convert(model, recipe, policy=Policy(min_gain=0, min_features=8))
    return model


def train_step(model: nn.Module) -> None:
    model(TOKENS).float().square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def train_step_in_bf16(model: nn.Module) -> None:
    with disabled(model):
        train_step(model)


USES: dict[str, Callable[[nn.Module], object]] = {
    "converted": lambda model: None,
    "trained": train_step,
    "stopped within a group": lambda model: model.layers[0].attention.wq(torch.randn(3, 64)),
    "recomputed": lambda model: (octavo.recompute(model), train_step(model)),
    "offloaded": lambda model: (octavo.offload(model), train_step(model)),
    "disabled": train_step_in_bf16,
}


@pytest.mark.covering(1)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("recipe", ["folded", "delayed", "block"])
@pytest.mark.parametrize("architecture", ["llama", "moe"])
def test_a_model_that_is_gone_keeps_no_weight(architecture, recipe, use):
    """Without waiting for the garbage collector: a weight in a reference cycle is memory that the next model lacks."""
    train_step(nn.Sequential(nn.Embedding(96, 8)))  # PyTorch's own first step keeps its caller's variables
    model = small(recipe, architecture)
    weights = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    use(model)
    del model
    assert [name for name, weight in weights.items() if weight() is not None] == []


@pytest.mark.parametrize("recipe", ["folded", "delayed"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "file"])
def test_a_copy_of_one_layer_carries_no_other(recipe, copied):
    model = small(recipe)
    train_step(model)
    layer = model.layers[0].attention.wk
    assert layer.shared is not None and len(layer.shared.layers) == 3
    layer.weight.grad = None
    assert len(pickle.dumps(layer)) < 1.5 * len(pickle.dumps(nn.Linear(64, 64, bias=False))) + 20_000
    twin, x = copied(layer), torch.randn(5, 64)
    assert twin.shared.layers == (twin,)
    assert torch.equal(twin(x), layer(x)) and not torch.equal(twin(x), x @ layer.weight.t())
    whole = copied(model)
    attention = whole.layers[0].attention
    assert attention.wk.shared.layers == (attention.wq, attention.wk, attention.wv)
    assert torch.equal(whole(TOKENS), model(TOKENS))


def test_a_shallow_copy_takes_nothing_from_its_original():
    model = small("folded", "moe")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    twin = copy.copy(experts)
    assert [gemm.owner for gemm in experts.products] == [experts] * 2
    attention = model.layers[0].attention
    layer = copy.copy(attention.wk)
    assert attention.wk.shared.layers[1] is attention.wk is not layer and twin is not experts


def test_a_gemm_of_experts_that_was_copied_alone_says_so():
    model = small("folded", "moe")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    with pytest.raises(UnsupportedError, match="no weights without their module"):
        _ = copy.deepcopy(experts.products[0]).weight


@pytest.mark.parametrize("recipe", ["folded", "delayed"])
@pytest.mark.parametrize("architecture", ["llama", "moe"])
def test_files_in_which_layers_carry_each_other_load(architecture, recipe, monkeypatch):
    """As written up to the commit 45e0ae86."""
    model = small(recipe, architecture)
    train_step(model)
    with monkeypatch.context() as older:
        older.setattr(SharedInput, "__getstate__", lambda group: {"layers": group.layers})
        older.setattr(Linear, "__getstate__", lambda layer: vars(layer))
        older.setattr(
            ScalingState, "__getstate__", lambda state: {**vars(state), "_model": None, "_layers": layers_of(state)}
        )
        owner = {"_owner": None}
        older.setattr(ExpertLinear, "__getstate__", lambda gemm: {**vars(gemm), **owner, "owner": (gemm.owner,)})
        whole, part = pickle.dumps(model), pickle.dumps(model.layers[0].attention.wk)
    loaded, layer, x = pickle.loads(whole), pickle.loads(part), torch.randn(5, 64)
    attention = loaded.layers[0].attention
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    assert attention.wk.shared.layers == (attention.wq, attention.wk, attention.wv)
    assert layer.shared.layers == (layer,)
    if recipe == "folded":
        assert torch.equal(layer(x), model.layers[0].attention.wk(x))
    else:  # the scale of its weight is that of the three, and the others have gone
        with pytest.raises(UnsupportedError, match="scales in common"):
            layer(x)
        assert len(layers_of(scales(loaded))) == len(layers_of(scales(model))) > 0


def layers_of(state: ScalingState) -> list[object]:
    return [layer for each in state._layers if (layer := each()) is not None]


def two_layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.ModuleDict({"up": nn.Linear(64, 64)}))
    convert(model)
    return model


def test_an_input_that_does_not_fit_names_the_layer():
    model = two_layers()
    for layer in (model[1]["up"], copy.deepcopy(model)[1]["up"], torch.compile(model[1]["up"], backend="eager")):
        with pytest.raises(ConfigError, match=r"layer '1.up': an input of shape \(3, 32\) cannot be multiplied"):
            layer(torch.randn(3, 32))
    with pytest.raises(ConfigError, match=r"layer '1.up': a linear layer takes a tensor, got list"):
        model[1]["up"]([1, 2, 3])
    bare = nn.Linear(64, 64)
    convert(bare)
    with pytest.raises(ConfigError, match="the model itself: an input of shape"):
        bare(torch.randn(3, 32))
    revert(model)
    assert not [name for name in vars(model[0]) if name.startswith("octavo")]


def test_torch_script_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"torch.jit.script cannot compile Linear.*torch.compile.*octavo.revert"):
        torch.jit.script(two_layers())


def test_a_rotated_model_computes_the_same_recomputed_copied_pickled_and_loaded():
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        octavo.convert(model, "rotated", policy=Policy(min_gain=0))
        return model

    def results(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[torch.Tensor]:
        x = torch.linspace(-3, 1, 5 * 64).reshape(5, 64).requires_grad_()
        y = (run or model)(x)
        y.square().sum().backward()
        return [y, x.grad, *(p.grad for p in model.parameters())]

    model, loaded = made(0), made(1)
    loaded.load_state_dict(model.state_dict())
    twins = [made(0), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]
    expected = results(model)
    found = [results(twins[0], lambda x: checkpoint(twins[0], x, use_reentrant=False)), *map(results, twins[1:])]
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
