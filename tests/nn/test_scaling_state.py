"""Scales kept from step to step: the rule against NumPy, who may change them, and what copies and files carry."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import CheckpointError, ConfigError
from octavo.nn import Linear
from octavo.nn.shared import SharedInput
from octavo.numerics import sqnr_db
from octavo.recipes import Recipe

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
WIDTH = 48


def layer_of(recipe: Recipe | str | dict, seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    return Linear(WIDTH, 32, bias=False, recipe=recipe)


def step(layer: nn.Module, *inputs: Tensor, gradient: float = 1.0) -> list[Tensor]:
    """One optimizer step that changes no weight. Return y, dx and dw of the last input."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer.zero_grad()
    for x in inputs:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(gradient * torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    optimizer.step()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]


def x_of(amax: float, tokens: int = 16) -> Tensor:
    x = torch.rand(tokens, WIDTH) * amax * 0.9
    x[3, 5] = -amax
    return x


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- the rule -------------------------------------------------------------------------------------------------------


class Oracle:
    """The delayed rule of one scale in NumPy."""

    def __init__(self, format: str, scaling: str, length: int, choose: str, margin: int) -> None:
        self.seen: list[np.float32] = []
        self.scale = np.float32(0)
        self.format, self.scaling, self.length, self.choose, self.margin = format, scaling, length, choose, margin

    def update(self, amax: float) -> None:
        if not 0 < amax < np.inf:
            return
        self.seen = [np.float32(amax), *self.seen][: self.length]
        exact = np.float64(max(self.seen) if self.choose == "max" else self.seen[0]) / LARGEST[self.format]
        if self.scaling == "power_of_two":
            exact = 2.0 ** np.ceil(np.log2(exact))
        self.scale = np.float32(exact) * np.float32(2.0**self.margin)


AMAXES = [2.0, 7.5, 0.3, 1000.0, 0.5, 0.4, 0.0, 3.0, 1e-6, 2.0]


@pytest.mark.parametrize("scaling", ["float32", "power_of_two"])
@pytest.mark.parametrize(("length", "choose", "margin"), [(16, "max", 0), (3, "max", 0), (3, "last", 1), (1, "max", 2)])
def test_scales_are_those_of_the_delayed_rule(scaling, length, choose, margin):
    operands = {"input": {"scaling": scaling}}, {"grad_output": {"scaling": scaling}}
    recipe = {
        "base": "delayed",
        "history": {"length": length, "choose": choose, "margin": margin},
        "fprop": operands[0],
        "dgrad": operands[1],
        "wgrad": operands[0] | operands[1],
    }
    layer = layer_of(recipe)
    inputs, gradients = (Oracle(format, scaling, length, choose, margin) for format in ("e4m3", "e5m2"))
    for i, amax in enumerate(AMAXES):
        step(layer, x_of(amax), gradient=float(i))
        inputs.update(amax)
        gradients.update(i)
        assert layer.scaling_slot.scale_and_amax[:, 0].tolist() == [inputs.scale, gradients.scale], i
        assert layer.scaling_slot.scale_and_amax[:, 1].tolist() == [0, 0]


def test_the_first_step_is_current_scaling_and_the_second_is_not():
    delayed, current, x = layer_of("delayed"), layer_of("tensorwise"), x_of(3.0)
    assert equal(step(delayed, x), step(current, x))
    smaller = x_of(0.01)
    assert not equal(step(delayed, smaller), step(current, smaller))


def test_the_same_tensor_again_is_current_scaling():
    delayed, current = layer_of("delayed"), layer_of("tensorwise")
    for _ in range(3):
        x = x_of(3.0)
        assert equal(step(delayed, x), step(current, x))


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), 0.0])
def test_what_is_no_maximum_changes_nothing(amax):
    layer = layer_of("delayed")
    step(layer, x_of(3.0))
    before = layer.scaling_state.state_dict()
    layer.scaling_slot.scale_and_amax[:, 1] = amax
    layer.scaling_state.update_scales()
    assert equal(list(before.values()), list(layer.scaling_state.state_dict().values()))


def test_values_that_are_not_finite_do_not_decide_a_scale():
    layer, x = layer_of("delayed"), x_of(3.0)
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    y, *_ = step(layer, x)
    assert layer.scaling_slot.scale_and_amax[0, 0] == np.float32(3.0 / 448)
    assert y[:2].isnan().all() and y[2:].isfinite().all()


def test_a_spike_saturates_under_delayed_and_is_seen():
    layer = layer_of("delayed")
    step(layer, x_of(1.0))
    x = x_of(1.0)
    x[0, 0] = 1000.0
    saturated = x.clamp(-1.0, 1.0)
    twin = copy.deepcopy(layer)
    y = layer(x.requires_grad_())
    assert torch.equal(y, twin(saturated.requires_grad_()))
    assert (
        float(layer.scaling_slot.scale_and_amax[0, 1]) == 1000.0
        and float(twin.scaling_slot.scale_and_amax[0, 1]) == 1.0
    )


def test_just_in_time_takes_its_own_scale_for_a_spike_at_once():
    just_in_time, current = layer_of("just_in_time"), layer_of("tensorwise")
    step(just_in_time, x_of(1.0))
    spike, calm = x_of(1000.0), x_of(0.5)
    assert equal(step(just_in_time, spike, gradient=500.0), step(current, spike, gradient=500.0))
    assert not equal(step(just_in_time, calm), step(current, calm)), "below its scale it keeps that of the history"


def test_a_margin_is_room_above_the_history():
    recipe = {"base": "delayed", "history": {"margin": 1}}
    with_room, without = layer_of(recipe), layer_of("delayed")
    for layer in (with_room, without):
        step(layer, x_of(1.0))
    x = x_of(1.9)
    exact = x @ with_room.weight.t()
    assert sqnr_db(exact, with_room(x)) > 25 > sqnr_db(exact, without(x))


@pytest.mark.parametrize("name", ["delayed", "just_in_time"])
def test_in_a_steady_state_it_is_as_near_to_float64_as_current_scaling(name):
    kept, current = layer_of(name), layer_of("tensorwise")
    for seed in range(4):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))
        got, reference = step(kept, x), step(current, x)
    dy = torch.linspace(-1, 1, 64 * 32, dtype=torch.float64).reshape(64, 32)
    weight = kept.weight.detach().double()
    for exact, one, other in zip(
        (x.double() @ weight.t(), dy @ weight, dy.t() @ x.double()), got, reference, strict=True
    ):
        assert sqnr_db(exact, one.double()) > sqnr_db(exact, other.double()) - 2


# --- who changes it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_leaves_no_trace(guard):
    layer = layer_of("delayed")
    step(layer, x_of(1.0))
    before = layer.scaling_slot.scale_and_amax.clone()
    with guard():
        layer(x_of(50.0))
    assert torch.equal(layer.scaling_slot.scale_and_amax, before)


def test_a_disabled_layer_leaves_no_trace():
    model = nn.Sequential(nn.Linear(WIDTH, 32))
    octavo.convert(model, "delayed")
    with octavo.disabled(model):
        step(model, x_of(1.0))
    assert not model[0].scaling_slot.scale_and_amax.any() and not octavo.scales(model).is_known


def test_an_accumulated_gradient_has_one_scale_made_of_all_its_parts():
    layer = layer_of("delayed")
    step(layer, x_of(1.0), x_of(8.0), x_of(2.0))
    assert layer.scaling_slot.scale_and_amax[0, 0] == np.float32(8.0 / 448)
    assert torch.count_nonzero(layer.scaling_state.history[:, 0]) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    plain, again = layer_of("just_in_time"), layer_of("just_in_time")
    for amax in (1.0, 5.0):
        x = x_of(amax)
        wrapped = nn.Module()
        wrapped.inner = again
        wrapped.forward = lambda x: checkpoint(again, x, use_reentrant=reentrant)
        assert equal(step(plain, x), step(wrapped, x))
    assert torch.equal(plain.scaling_slot.scale_and_amax, again.scaling_slot.scale_and_amax)


def test_saved_tensors_may_be_copies():
    layer = layer_of("delayed")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        step(layer, x_of(1.0))
    assert (layer.scaling_slot.scale_and_amax[:, 0] > 0).all()


def test_steps_and_calls_between_forward_and_backward_are_no_mistake():
    layer, x = layer_of("delayed"), x_of(1.0).requires_grad_()
    y = layer(x)
    layer.scaling_state.update_scales()
    (y + layer(x)).sum().backward()
    assert x.grad.isfinite().all()


def test_compiled_it_is_what_it_is_in_eager_mode():
    eager, twin = layer_of("just_in_time"), layer_of("just_in_time")
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for amax in (1.0, 0.5, 300.0):
        x = x_of(amax)
        assert equal(step(eager, x), step(compiled, x))
        assert torch.equal(eager.scaling_slot.scale_and_amax, twin.scaling_slot.scale_and_amax)
    with torch.no_grad():
        compiled(x_of(9.0))
    assert torch.equal(eager.scaling_slot.scale_and_amax, twin.scaling_slot.scale_and_amax)
    torch._dynamo.reset()


def stepped(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()


def test_the_optimizer_of_another_model_updates_no_scales():
    layer, other = layer_of("delayed"), layer_of("delayed")
    layer(x_of(1.0))
    stepped(other.weight)
    assert layer.scaling_slot.scale_and_amax[0].tolist() == [0, 1]
    stepped(layer.weight)
    assert layer.scaling_slot.scale_and_amax[0].tolist() == [np.float32(1 / 448), 0]


UPDATED, WAITS = [np.float32(1 / 448), 0], [0, 1]


def test_an_optimizer_that_holds_no_parameter_of_a_model_updates_scales_that_nobody_holds():
    frozen, adapter = layer_of("delayed"), nn.Parameter(torch.ones(WIDTH))
    frozen(adapter * x_of(1.0))
    stepped(adapter)
    assert frozen.scaling_slot.scale_and_amax[0].tolist() == UPDATED


def test_an_optimizer_that_has_nothing_to_do_with_a_model_does_not_update_its_scales():
    model = nn.Sequential(nn.Linear(WIDTH, 32))
    octavo.convert(model, "delayed")
    optimizer = octavo.optim.AdamW(model.parameters(), lr=0.0)
    model(x_of(2.0)).sum().backward()
    optimizer.step()
    before = float(model[0].scaling_slot.scale_and_amax[0, 0])
    model(x_of(1.0)).sum().backward()
    stepped(nn.Parameter(torch.ones(3)))
    assert model[0].scaling_slot.scale_and_amax[0].tolist() == [before, 1.0]
    optimizer.step()
    assert model[0].scaling_slot.scale_and_amax[0].tolist() == [before, 0.0] and model[0].scaling_state.history[
        :2, 0
    ].tolist() == [1.0, 2.0]


def test_an_optimizer_of_any_parameter_of_a_model_updates_its_scales():
    """As with adapters inside of a model whose own weights are frozen."""
    model = nn.ModuleDict({"frozen": nn.Linear(WIDTH, 32), "adapter": nn.Linear(WIDTH, 32)})
    octavo.convert(model, {"base": "delayed", "modules": {"adapter": "bf16"}})
    model.frozen.requires_grad_(False)
    other = model_of()
    for held in (False, True):
        other[0].out.scaling_slot.scale_and_amax[0, 1] = 1.0
        (model.frozen(x_of(1.0)) + model.adapter(x_of(1.0))).sum().backward()
        stepped(*model.adapter.parameters())
        assert model.frozen.scaling_slot.scale_and_amax[0].tolist() == UPDATED and model.frozen.scaling_state.is_held
        assert (
            other[0].out.scaling_slot.scale_and_amax[0].tolist() == WAITS and not other[0].out.scaling_state.is_held
        ), held


def test_a_copy_of_a_held_model_is_held_by_nobody_yet():
    model = model_of()
    step(model, x_of(1.0))
    twin = copy.deepcopy(model)
    assert model[0].q.scaling_state.is_held and not twin[0].q.scaling_state.is_held
    step(twin, x_of(9.0))
    assert twin[0].q.scaling_state.is_held


# --- updates that do not come ---------------------------------------------------------------------------------------


def scales_by_its_own_maxima(model: nn.Module, x: Tensor) -> bool:
    """Whether the result for x is that of scales which are not known yet."""
    fresh = copy.deepcopy(model)
    octavo.scales(fresh).scale_and_amax.zero_()
    with torch.no_grad():
        return torch.equal(model(x), fresh(x))


def deep_copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def filed(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


def restored(model: nn.Module) -> nn.Module:
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    octavo.scales(twin).load_state_dict(octavo.scales(model).state_dict())
    return twin


@pytest.mark.parametrize("make", [deep_copied, filed, averaged, restored])
def test_a_copy_that_no_optimizer_steps_keeps_up_with_its_inputs(make):
    model = model_of()
    step(model, x_of(1.0))
    twin = make(model)
    for n in range(1, 12):
        step(model, x_of(2.0**n))
        assert scales_by_its_own_maxima(twin, x_of(2.0**n)) == (n > 1)
    step(twin, x_of(1.0))
    assert (octavo.scales(twin).scale_and_amax[:, 0] > 0).all()


def test_a_copy_keeps_up_beside_an_optimizer_of_master_weights():
    """Which holds no parameter of any model."""
    model = model_of()
    master = nn.Parameter(torch.ones(3))
    model(x_of(1.0)).sum().backward()
    stepped(master)
    twin = copy.deepcopy(model)
    for n in range(1, 17):
        assert not scales_by_its_own_maxima(twin, x_of(2.0))
        model(x_of(1.0 + n)).sum().backward()
        stepped(master)
    assert scales_by_its_own_maxima(twin, x_of(2.0)) and not scales_by_its_own_maxima(model, x_of(2.0))


def test_a_trained_model_without_its_optimizer_is_out_of_date_in_the_end():
    model, other = model_of(), model_of()
    step(model, x_of(1.0))
    step(other, x_of(1.0))
    for _ in range(15):
        assert not scales_by_its_own_maxima(model, x_of(3.0))
        step(other, x_of(1.0))
    assert scales_by_its_own_maxima(model, x_of(3.0))


def minus(p: Tensor) -> None:
    with torch.no_grad():
        p -= 1e-9 * p.grad


def minus_data(p: Tensor) -> None:
    p.data.add_(p.grad, alpha=-1e-9)


def new_data(p: Tensor) -> None:
    p.data = p.data - 1e-9 * p.grad


@pytest.mark.covering(1)
@pytest.mark.parametrize("write", [minus, minus_data, new_data])
@pytest.mark.parametrize("recipe", ["delayed", "just_in_time"])
def test_a_loop_that_changes_to_updates_of_its_own_keeps_up(write, recipe):
    model = model_of(recipe)
    step(model, x_of(1.0))
    for n in range(20):
        model.zero_grad()
        model(x_of(1.0 + n)).mean().backward()
        for p in model.parameters():
            write(p)
    assert scales_by_its_own_maxima(model, x_of(1000.0))
    step(model, x_of(3.0))
    assert not scales_by_its_own_maxima(model, x_of(1.0))


def test_an_update_of_its_own_may_update_the_scales():
    model, twin = model_of(), model_of()
    for n in range(40):
        step(twin, x := x_of(1.0 + n))
        model.zero_grad()
        model(x.clone().requires_grad_()).backward(torch.linspace(-1, 1, x.numel()).reshape(x.shape))
        for p in model.parameters():
            minus_zero(p)
        octavo.scales(model).update_scales()
    assert octavo.scales(model).is_known
    assert torch.equal(octavo.scales(model).scale_and_amax, octavo.scales(twin).scale_and_amax)


def minus_zero(p: Tensor) -> None:
    with torch.no_grad():
        p -= 0.0 * p.grad


@pytest.mark.parametrize("parts", [1, 5])
def test_an_accumulated_step_may_have_eight_times_the_parts(parts):
    model = model_of()
    step(model, *[x_of(1.0)] * parts)
    for _ in range(8 * (parts + 1)):
        model(x_of(1.0)).sum().backward()
    assert octavo.scales(model).is_known
    model(x_of(1.0))
    assert not octavo.scales(model).is_known


def test_static_scales_are_not_forgotten(tmp_path):
    model = model_of()
    step(model, x_of(1.0))
    octavo.scales(model).save(tmp_path / "scales.json")
    model = model_of("static", scales=tmp_path / "scales.json")
    before = octavo.scales(model).scale_and_amax[:, 0].clone()
    for _ in range(20):
        step(model_of(), x_of(1.0))
        model(x_of(1.0)).sum().backward()
        minus(model[0].q.weight)
    assert torch.equal(octavo.scales(model).scale_and_amax[:, 0], before)


# --- models ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.q(x), self.k(x).square(), self.v(x)], dim=-1))


def model_of(recipe: Recipe | str | dict = "delayed", **arguments) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    octavo.convert(model, recipe, **arguments)
    return model


def test_layers_that_share_an_input_share_its_scale():
    model = model_of()
    assert isinstance(model[0].q.shared, SharedInput)
    assert (
        model[0].q.scaling_slot is model[0].k.scaling_slot is model[0].v.scaling_slot is not model[0].out.scaling_slot
    )
    assert len(octavo.scales(model)) == 2 * (1 + 1) * 2
    state = octavo.scales(model).state_dict()
    assert list(state)[:3] == ["0.q.input", "0.k.input", "0.v.input"] and len(state) == 16
    step(model, x_of(1.0))
    state = octavo.scales(model).state_dict()
    assert torch.equal(state["0.q.input"], state["0.v.input"]) and state["0.q.input"][0] == np.float32(1 / 448)


def test_recipes_without_state_have_no_book():
    assert octavo.scales(model_of("folded")) is None
    mixed = model_of({"base": "folded", "modules": {"1.out": "delayed"}})
    assert list(octavo.scales(mixed).state_dict()) == ["1.out.input", "1.out.grad_output"]


def test_each_recipe_keeps_its_own_history():
    recipe = {"base": "delayed", "modules": {"1.*": {"base": "delayed", "history": {"length": 2, "choose": "last"}}}}
    model = model_of(recipe)
    for amax in (5.0, 2.0, 1.0):
        step(model[0], x_of(amax))
        step(model[1], x_of(amax))
    assert model[0].q.scaling_slot.scale_and_amax[0, 0] == np.float32(5 / 448)
    assert model[1].q.scaling_slot.scale_and_amax[0, 0] == np.float32(1 / 448)


def test_layers_built_one_by_one_are_joined():
    model = nn.Sequential(
        layer_of("delayed"), nn.Tanh(), Linear(32, 16, recipe={"base": "delayed", "history": {"length": 4}})
    )
    step(model, x_of(1.0))
    before = [model[i].scaling_slot.scale_and_amax.clone() for i in (0, 2)]
    stored = octavo.scales(model)
    assert stored is octavo.scales(model) is model[0].scaling_state is model[2].scaling_state
    assert equal(before, [model[i].scaling_slot.scale_and_amax for i in (0, 2)])
    assert list(stored.state_dict()) == ["0.input", "0.grad_output", "2.input", "2.grad_output"]
    assert torch.equal(stored.state_dict()["0.input"][2:3], torch.tensor([1.0]))


def test_revert_closes_the_book():
    model = model_of()
    octavo.revert(model)
    assert octavo.scales(model) is None and "scaling_slot" not in vars(model[0].q)


def test_copies_have_scales_of_their_own():
    model = model_of()
    step(model, x_of(1.0))
    twin = copy.deepcopy(model)
    before = octavo.scales(model).state_dict()
    step(twin, x_of(9.0))
    assert equal(list(before.values()), list(octavo.scales(model).state_dict().values()))
    assert twin[0].q.scaling_slot.scale_and_amax[0, 0] == np.float32(9 / 448)


def test_a_pickled_model_goes_on_with_its_scales():
    model = model_of()
    step(model, x_of(1.0))
    twin = pickle.loads(pickle.dumps(model))
    for amax in (3.0, 0.1):
        x = x_of(amax)
        assert equal(step(model, x), step(twin, x))


def test_moving_takes_the_book_along():
    layer = layer_of("delayed")
    step(layer, x_of(1.0))
    layer.to("meta")
    assert layer.scaling_state.scale_and_amax.is_meta and layer.scaling_slot.scale_and_amax.is_meta
    layer.to_empty(device="cpu")
    assert layer.scaling_slot.scale_and_amax.tolist() == [[0, 0], [0, 0]]
    layer.double()
    assert layer.scaling_slot.scale_and_amax.dtype == torch.float32
    layer.scaling_slot.scale_and_amax[0, 0] = 3.0
    assert layer.scaling_state.scale_and_amax[0, 0] == 3.0


def test_a_layer_and_its_scales_on_two_devices_are_refused():
    layer = layer_of("delayed")
    layer.scaling_slot.scale_and_amax = layer.scaling_slot.scale_and_amax.to("meta")
    with pytest.raises(ConfigError, match="a tensor on cpu has its scale on meta"):
        layer(x_of(1.0))


# --- across ranks ---------------------------------------------------------------------------------------------------


def test_one_all_reduce_a_step_takes_the_larger_maxima(monkeypatch):
    model, calls = model_of(), []

    def all_reduce(amax: Tensor, op: object) -> None:
        calls.append(op)
        assert amax.is_contiguous() and amax.shape == (8,)
        amax.copy_(torch.maximum(amax, torch.full_like(amax, 7.0)))  # of another rank

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    step(model, x_of(1.0))
    assert calls == [torch.distributed.ReduceOp.MAX]
    assert model[0].q.scaling_slot.scale_and_amax[0, 0] == np.float32(7 / 448)


# --- states and files -----------------------------------------------------------------------------------------------


def test_a_state_goes_round():
    model, twin = model_of(), model_of()
    for amax in (1.0, 4.0):
        step(model, x_of(amax))
    file = io.BytesIO()
    torch.save(octavo.scales(model).state_dict(), file)
    file.seek(0)
    octavo.scales(twin).load_state_dict(torch.load(file, weights_only=True))
    for amax in (2.0, 3.0):
        x = x_of(amax)
        assert equal(step(model, x), step(twin, x))


def test_layers_that_are_joined_take_the_largest_of_the_states():
    apart, joined = model_of(policy=octavo.Policy(fuse=False)), model_of()
    for gradient in (2.0, 3.0):
        step(apart, x_of(1.0), gradient=gradient)
    state = octavo.scales(apart).state_dict()
    octavo.scales(joined).load_state_dict(state)
    rows = torch.stack([state[f"0.{name}.grad_output"] for name in "qkv"])
    largest = rows.amax(0)
    assert not torch.equal(largest, rows.amin(0))
    after = octavo.scales(joined).state_dict()
    assert all(torch.equal(after[f"0.{name}.grad_output"], largest) for name in "qkv")


def test_states_of_others_are_refused():
    stored, state = octavo.scales(model_of()), octavo.scales(model_of()).state_dict()
    with pytest.raises(CheckpointError, match=r"only the model keeps one for '0\.k\.input'"):
        stored.load_state_dict({name: tensor for name, tensor in state.items() if name != "0.k.input"})
    with pytest.raises(CheckpointError, match=r"only the checkpoint keeps one for 'q'"):
        stored.load_state_dict({**state, "q": torch.zeros(18)})
    with pytest.raises(CheckpointError, match="has a history of 3 there and 16 here"):
        stored.load_state_dict({**state, "0.k.input": torch.ones(5)})
    assert not stored.is_known


def test_static_scales_come_from_a_file_and_stay(tmp_path):
    model = model_of()
    for amax in (4.0, 1.0):
        step(model, x_of(amax))
    octavo.scales(model).save(tmp_path / "scales.json")
    static = model_of("static", scales=tmp_path / "scales.json")
    stored = octavo.scales(model).scale_and_amax[:, 0].clone()
    assert torch.equal(octavo.scales(static).scale_and_amax[:, 0], stored)
    step(static, x_of(100.0))
    assert torch.equal(octavo.scales(static).scale_and_amax[:, 0], stored), "never updated"
    assert static[0].q.scaling_slot.scale_and_amax[0, 1] == 100.0, "and what it missed is seen"
    x = x_of(1.0)
    with torch.no_grad():
        assert torch.equal(static(x), model(x))


def test_layers_that_are_joined_take_the_largest_of_their_scales(tmp_path):
    apart = model_of(policy=octavo.Policy(fuse=False))
    step(apart, x_of(1.0), gradient=2.0)
    octavo.scales(apart).save(tmp_path / "scales.json")
    joined = model_of("static", scales=tmp_path / "scales.json")
    found = [getattr(apart[0], name).scaling_slot.scale_and_amax[1, 0] for name in "qkv"]
    assert len(set(map(float, found))) > 1 and joined[0].q.scaling_slot.scale_and_amax[1, 0] == max(found)


def test_delayed_may_start_from_a_file(tmp_path):
    model = model_of()
    step(model, x_of(4.0))
    octavo.scales(model).save(tmp_path / "scales.json")
    assert torch.equal(
        octavo.scales(model_of(scales=tmp_path / "scales.json")).scale_and_amax, octavo.scales(model).scale_and_amax
    )


def test_nothing_to_save_yet(tmp_path):
    with pytest.raises(ConfigError, match="no scale is known yet"):
        octavo.scales(model_of()).save(tmp_path / "scales.json")


def test_scales_that_nobody_holds_are_forgotten():
    from octavo.nn import scaling_state

    before = len(scaling_state._live)
    layer = layer_of("delayed")
    assert len(scaling_state._live) == before + 1
    del layer
    assert len(scaling_state._live) == before


# --- on a GPU -------------------------------------------------------------------------------------------------------

WIDE = 256


def on_gpu(recipe: str = "just_in_time") -> nn.Sequential:
    torch.manual_seed(0)
    layers = (Linear(WIDE, WIDE, bias=False, recipe=recipe) for _ in range(2))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, keeps_grad: bool = True) -> None:
    optimizer.zero_grad(set_to_none=not keeps_grad)
    model(x).float().square().mean().backward()
    optimizer.step()


def inputs_of_steps(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(128, WIDE, device="cuda").bfloat16() * 10.0 ** (i % 3) for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "just_in_time"])
def test_nothing_waits_for_the_gpu(recipe):
    model = on_gpu(recipe)
    octavo.scales(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first, *rest = inputs_of_steps(4)
    train(model, optimizer, first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in rest:
            train(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert octavo.scales(model).is_known


@pytest.mark.gpu
def test_a_captured_step_updates_as_an_eager_one_does():
    eager, captured = on_gpu(), on_gpu()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (eager, captured)]
    steps, static = inputs_of_steps(6), torch.zeros(128, WIDE, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in steps[:3]:
            static.copy_(x)
            train(captured, optimizers[1], static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(captured, optimizers[1], static)
    for x in steps[3:]:
        static.copy_(x)
        graph.replay()
    for x in steps:
        train(eager, optimizers[0], x)
    for one, other in zip(eager, captured, strict=True):
        assert (
            torch.allclose(one.scaling_state.scale_and_amax, other.scaling_state.scale_and_amax, rtol=1e-2)
            and one.scaling_state.is_known
        )
        assert torch.allclose(one.scaling_state.history, other.scaling_state.history, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_on_a_gpu_it_keeps_the_scales_of_eager_mode(mode):
    eager, twin = on_gpu(), on_gpu()
    compiled = torch.compile(twin, fullgraph=True, mode=mode)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (eager, twin)]
    for x in inputs_of_steps(6):
        train(eager, optimizers[0], x)
        train(compiled, optimizers[1], x, keeps_grad=False)  # CUDA graphs write each step's to the same place
    for one, other in zip(eager, twin, strict=True):
        assert (
            torch.allclose(one.scaling_state.history, other.scaling_state.history, rtol=1e-2)
            and one.scaling_state.is_known
        )
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_book_comes_along_to_the_gpu_and_back():
    model = on_gpu()
    assert model[0].scaling_slot.scale_and_amax.is_cuda
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), inputs_of_steps(1)[0])
    state = octavo.scales(model).state_dict()
    model.cpu()
    assert not model[0].scaling_slot.scale_and_amax.is_cuda
    assert equal(list(state.values()), list(octavo.scales(model).state_dict().values()))


# --- static scales made anew ----------------------------------------------------------------------------------------


def static(tmp_path, *amaxes: float) -> nn.Sequential:
    """Two layers with static scales, and these maxima since: input and gradient of the first, then of the second."""
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, 32))
    octavo.convert(model, "delayed")
    stored = octavo.scales(model)
    stored.scale_and_amax[:, 0] = 1.0
    stored.save(tmp_path / "a.json")
    octavo.convert(model, "static", scales=tmp_path / "a.json")
    octavo.scales(model).scale_and_amax[:, 1] = torch.tensor(amaxes)
    return model


def test_static_scales_are_made_anew_of_the_largest_values_since(tmp_path):
    stored = octavo.scales(static(tmp_path, 7.0, 0.0, float("inf"), 3.0))
    made = stored.recalibrate(margin=2, how="a test")
    expected = {"0.input": float(np.float32(7 / 448)) * 4, "1.grad_output": float(np.float32(3 / 57344)) * 4}
    assert {name: one.scale for name, one in made.items()} == expected
    assert {name: one.amax for name, one in made.items()} == {"0.input": 7.0, "1.grad_output": 3.0}
    assert {one.origin.how for one in made.values()} == {"a test"}
    assert stored.scale_and_amax[:, 0].tolist() == [expected["0.input"], 1.0, 1.0, expected["1.grad_output"]]
    assert stored.scale_and_amax[:, 1].tolist() == [0.0, 0.0, float("inf"), 0.0]
    assert stored.recalibrate() == {}


def test_some_static_scales_are_made_anew_alone(tmp_path):
    stored = octavo.scales(static(tmp_path, 7.0, 5.0, 9.0, 3.0))
    assert stored.recalibrate({"1.input", "1.weight"}).keys() == {"1.input"}
    assert stored.scale_and_amax[:, 1].tolist() == [7.0, 5.0, 0.0, 3.0]


def test_other_scales_are_not_made_anew(tmp_path):
    layer = layer_of("delayed")
    step(layer, x_of(3.0))
    before = layer.scaling_state.scale_and_amax.clone()
    layer.scaling_slot.scale_and_amax[:, 1] = 9.0
    assert not layer.scaling_state.has_static and layer.scaling_state.recalibrate() == {}
    assert torch.equal(layer.scaling_state.scale_and_amax[:, 0], before[:, 0])


def test_all_ranks_make_the_same_static_scales(tmp_path, monkeypatch):
    model = static(tmp_path, 7.0, 0.0, 0.0, 0.0)

    def all_reduce(tensor: Tensor, op: object) -> None:
        assert op is torch.distributed.ReduceOp.MAX
        tensor[:2] = torch.maximum(tensor[:2], torch.tensor([1.0, 2.0]))

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    made = octavo.scales(model).recalibrate()
    assert {name: one.amax for name, one in made.items()} == {"0.input": 7.0, "0.grad_output": 2.0}
