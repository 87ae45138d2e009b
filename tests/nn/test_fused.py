"""A user's MLP module, fused: the user's class in every respect, and the user's forward wherever anybody looks in."""

import copy
import io
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.nn import Linear
from octavo.nn.functional import Quantizer
from octavo.nn.fused import FusedMLP, MLPRoles, fuse, fusion_groups
from octavo.nn.mlp import mlp
from octavo.numerics import sqnr_db
from octavo.recipes import load


class FeedForward(nn.Module):
    """Somebody's SwiGLU."""

    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)
        self.act = nn.SiLU()
        self.calls = deque()  # of `forward`

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.append(len(x))
        return self.down(self.act(self.gate(x)) * self.up(x)) * scale


class Custom(FeedForward):
    """With a way of its own to be copied, printed and pickled."""

    def __getstate__(self):
        return {**self.__dict__, "copied": True}

    def extra_repr(self):
        return "mine"


ROLES = MLPRoles("silu", ("gate", "up"), "down")


def plain(cls: type[FeedForward] = FeedForward, recipe: str = "folded") -> FeedForward:
    """The layers in FP8, not fused."""
    model = cls()
    for layer in (model.gate, model.up, model.down):
        Linear.adopt(layer, load(recipe))
    for layer in (model.gate, model.up):  # as `convert` does: one object for all
        layer.recipe = model.down.recipe
    return model


def fused(cls: type[FeedForward] = FeedForward, recipe: str = "folded") -> FeedForward:
    model = plain(cls, recipe)
    fuse(model, ROLES)
    return model


def gemms(model: nn.Module, *args, **kwargs) -> tuple[Tensor, int, int]:
    """The result, how often the user's forward ran, and how many GEMMs."""
    before = len(model.calls)
    with kernels.record() as ledger:
        y = model(*args, **kwargs)
    return y, len(model.calls) - before, sum(ledger.gemms.values())


def users_forward_runs(model: nn.Module, *args, **kwargs) -> bool:
    return gemms(model, *args, **kwargs)[1] == 1


X = torch.linspace(-2, 2, 5 * 64).reshape(5, 64)


def test_it_computes_the_mlp_as_one():
    model, x = fused(), X.clone().requires_grad_()
    y, calls, count = gemms(model, x)
    assert (calls, count) == (0, 3)
    layers, recipe = (model.gate, model.up, model.down), load("folded")
    weights = [layer.weight for layer in layers]
    expected = mlp(x, weights, "silu", (Quantizer(recipe, torch.float32),) * 2)
    assert torch.equal(y, expected + model.down.bias)
    with kernels.record() as ledger:
        y.sum().backward()
    assert sum(ledger.gemms.values()) == 4
    assert sqnr_db(plain_twin(model)(X).detach(), y.detach()) > 35


def plain_twin(model: FeedForward) -> FeedForward:
    twin = copy.deepcopy(model)
    twin.release()
    return twin


def test_it_is_an_instance_of_the_users_class_and_shows_what_it_is():
    model = fused()
    assert isinstance(model, FeedForward) and isinstance(model, FusedMLP)
    assert type(model).__name__ == "FusedFeedForward" and type(model).__doc__ == FeedForward.__doc__
    assert repr(model).startswith("FusedFeedForward(\n  activation=silu\n  (gate): Linear(")
    assert "mine, activation=silu" in repr(fused(Custom))
    assert type(fused()) is type(model) is not type(fused(Custom))


def test_names_parameters_and_children_stay():
    model = plain()
    parameters, children = list(model.named_parameters()), list(model.named_children())
    fuse(model, ROLES)
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]
    assert [(n, id(c)) for n, c in model.named_children()] == [(n, id(c)) for n, c in children]
    assert list(model.state_dict()) == ["gate.weight", "up.weight", "down.weight", "down.bias"]


def test_unfusing_restores_everything():
    model = plain()
    before = type(model), dict(vars(model))
    expected = model(X)
    fuse(model, ROLES)
    model(X)
    model.release()
    assert type(model) is before[0] is FeedForward
    assert dict(vars(model)) == before[1]
    assert torch.equal(model(X), expected)


def test_autocast():
    model = fused()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == torch.bfloat16
    assert model(X).dtype == torch.float32
    model.bfloat16()(X.bfloat16()).sum().backward()
    assert model.up.weight.grad.dtype == torch.bfloat16


# --- where somebody looks in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("child", ["gate", "up", "down", "act"])
@pytest.mark.parametrize(
    "register",
    [
        lambda m, f: m.register_forward_hook(f),
        lambda m, f: m.register_forward_hook(lambda module, args, kwargs, y: f(), with_kwargs=True),
        lambda m, f: m.register_forward_pre_hook(f),
        lambda m, f: m.register_full_backward_hook(f),
        lambda m, f: m.register_full_backward_pre_hook(f),
    ],
    ids=["forward", "forward with kwargs", "forward pre", "backward", "backward pre"],
)
def test_a_hook_inside_is_called_and_nothing_computed_without_it(child, register):
    model, seen, x = fused(), [], X.clone().requires_grad_()
    handle = register(model.get_submodule(child), lambda *_: seen.append(child))
    expected = plain_twin(model)(x)
    seen.clear()
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected) and seen == [child]
    handle.remove()
    assert not users_forward_runs(model, x)


def test_a_hook_of_all_modules_sees_the_children():
    model, seen = fused(), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        model(X)
    finally:
        handle.remove()
    assert seen == [Linear, nn.SiLU, Linear, Linear, type(model)]
    assert not users_forward_runs(model, X)


def test_hooks_of_the_module_itself_are_called_and_it_stays_fused():
    model, seen = fused(), []
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    y, calls, _ = gemms(model, X.clone().requires_grad_())
    y.sum().backward()
    assert seen == ["pre", "forward", "backward"] and calls == 0


def test_hooks_of_parameters_are_called():
    model, seen = fused(), []
    for name, p in model.named_parameters():
        p.register_hook(lambda _, name=name: seen.append(name))
    model(X).sum().backward()
    assert sorted(seen) == ["down.bias", "down.weight", "gate.weight", "up.weight"]


@pytest.mark.parametrize("child", ["gate", "up", "down"])
def test_a_disabled_layer_inside(child):
    model = fused()
    model.get_submodule(child).enabled = False
    y, calls, count = gemms(model, X)
    assert (calls, count) == (1, 2)
    assert torch.equal(y, plain_twin(model)(X))


def another_recipe(model: FeedForward) -> None:
    model.down.recipe = load("block")


def another_layer(model: FeedForward) -> None:
    model.up = nn.Linear(64, 128, bias=False)


def a_subclass(model: FeedForward) -> None:
    class Lora(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model.gate.__class__ = Lora


def parametrised(model: FeedForward) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.up)


@pytest.mark.parametrize("change", [another_recipe, another_layer, a_subclass, parametrised])
def test_a_layer_that_is_no_longer_what_it_was(change):
    model = fused()
    change(model)
    assert torch.equal(model(X), plain_twin(model)(X))
    assert users_forward_runs(model, X)


class Configured(nn.Module):
    """An MLP that is what its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64)
        self.act, self.drop, self.scale = nn.GELU(), nn.Dropout(0.0), 1.0
        self.after = partial(F.threshold, threshold=-1e9, value=0.0)
        self.sizes, self.factors, self.pair, self.named = [64, 128], [1.0], (1.0, "last"), {"factor": 1.0}
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(self.drop(self.down(self.act(self.gate(x)) * self.up(x))) * self.scale)
        y = y * self.factors[0] * self.pair[0] * self.named["factor"]
        return y if self.shift is None else y + self.shift


def another_activation(model: Configured) -> None:
    model.act = nn.SiLU()


def another_form_of_it(model: Configured) -> None:
    model.act.approximate = "tanh"


def dropout(model: Configured) -> None:
    model.drop.p = 0.5


def another_number(model: Configured) -> None:
    model.scale = 2.0


def other_arguments(model: Configured) -> None:
    model.after = partial(F.threshold, threshold=0.0, value=0.0)


def a_new_parameter(model: Configured) -> None:
    model.shift = nn.Parameter(torch.ones(64))


def a_bias_before_the_activation(model: Configured) -> None:
    model.up.bias = nn.Parameter(torch.ones(128))


def another_item(model: Configured) -> None:
    model.factors[0] = 2.0


def another_tuple(model: Configured) -> None:
    model.pair = (2.0, "last")


def another_value(model: Configured) -> None:
    model.named["factor"] = 2.0


CHANGES = [
    *(another_activation, another_form_of_it, dropout, another_number, other_arguments, a_new_parameter),
    *(another_item, another_tuple, another_value),
]


@pytest.fixture(scope="module")
def converted_with_and_without_fusion():
    models = []
    for fuses in (True, False):
        torch.manual_seed(0)
        models.append(Configured())
        octavo.convert(models[-1], policy=octavo.Policy(min_features=8, fuse=fuses))
    return models


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        *((change, False) for change in (*CHANGES, a_bias_before_the_activation)),
        pytest.param(another_number, True, marks=pytest.mark.slow),
    ],
)
def test_what_changes_the_formula_later_is_computed(change, compiled, converted_with_and_without_fusion):
    model, twin = copy.deepcopy(converted_with_and_without_fusion)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    assert isinstance(model, FusedMLP)
    with kernels.record() as ledger:
        assert same(results(model, run), results(model))
    assert sum(ledger.gemms.values()) == 2 * 7  # fused
    for each in (model, twin):
        change(each)
    torch.manual_seed(1)
    y = run(X)
    torch.manual_seed(1)
    assert torch.equal(y, twin(X))
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    assert isinstance(model, FusedMLP) == (change in (another_activation, another_form_of_it))
    torch._dynamo.reset()


@contextmanager
def changed(model: nn.Module, change) -> Iterator[None]:
    """Change a module, and at the end restore its attributes and what its lists and dictionaries hold."""
    attributes = [(vars(module), vars(module).copy()) for module in model.modules()]
    containers = [(x, x.copy()) for _, held in attributes for x in held.values() if isinstance(x, dict | list)]
    change(model)
    yield
    for held, before in (*attributes, *containers):
        held.clear()
        held.extend(before) if isinstance(held, list) else held.update(before)


def test_compiled_code_notices_whatever_changes_the_formula(recompiles):
    model = Configured()
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    run = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        run(X)
        for change in (*CHANGES, a_bias_before_the_activation):
            with changed(model, change):
                assert recompiles(run, X), change.__name__
            assert not recompiles(run, X), change.__name__
    torch._dynamo.reset()


def test_a_change_of_the_formula_is_said(caplog, monkeypatch):
    monkeypatch.setattr("octavo.kernels.runtime.ledger._warned", set())
    model = Configured()
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    model.train().eval().requires_grad_(False)
    model(X)
    assert not caplog.messages
    model.drop.p = 0.5
    model(X)
    assert "FusedConfigured.drop.p has changed since octavo.convert" in caplog.text


def scaled_mlp(model: nn.Module, x: Tensor) -> Tensor:
    return model.down(F.silu(model.gate(x)) * model.up(x)) * model.scale


class Delegating(FeedForward):
    """Its attributes are read outside of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return scaled_mlp(self, x)


def unnamed(forward):
    return lambda self, x: forward(self, x)


class Decorated(Delegating):
    forward = unnamed(scaled_mlp)


@pytest.mark.parametrize("cls", [Delegating, Decorated])
def test_a_number_that_a_function_reads_for_the_module(cls):
    model = cls()
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    y = model(X)
    assert isinstance(model, FusedMLP)
    model.scale = 2.0
    assert sqnr_db(2 * y.detach(), model(X).detach()) > 35


class OfItsLayer(FeedForward):
    """It reads its position, by which it may compute something else in another layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, 1.0 if self.layer_idx < 4 else 0.5)


class OfAnyLayer(OfItsLayer):
    """It also works without a position."""

    def forward(self, x: Tensor) -> Tensor:
        return FeedForward.forward(self, x, 1.0 if getattr(self, "layer_idx", 0) < 4 else 0.5)


@pytest.mark.parametrize("position", [0, 7])
@pytest.mark.parametrize("cls", [OfItsLayer, OfAnyLayer])
def test_a_module_that_depends_on_its_position_is_not_fused(cls, position):
    model = cls(position)
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    assert not isinstance(model, FusedMLP) and model.layer_idx == position


POSITIONS = ("layer_index", "layer_idx", "block_id", "name")


@pytest.mark.parametrize(
    "types", [(int, float, str, str), *(pytest.param((t,) * 4, marks=pytest.mark.slow) for t in (int, float, str))]
)
@torch.no_grad()
def test_a_block_is_compiled_once_for_all_layers(types):
    """A module's position, which `forward` does not read, is none of its settings."""
    blocks = [Configured() for _ in range(3)]
    for i, block in enumerate(blocks):
        for name, own in zip(POSITIONS, types, strict=True):
            setattr(block, name, own(i))
    model = nn.Sequential(*blocks)
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    counter = CompileCounterWithBackend("eager")
    for block in blocks:
        assert isinstance(block, FusedMLP)
        block.compile(backend=counter, fullgraph=True)
    model(X)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("value", [frozenset({1}), range(3), slice(2)], ids=["frozenset", "range", "slice"])
def test_compilers_recognise_a_module_whatever_its_attributes_are(value):
    model = Configured()
    model.sections = value
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    assert torch.compile(model.is_as_recognised, backend="eager", fullgraph=True)()
    torch._dynamo.reset()


def test_more_than_one_argument_goes_to_the_users_forward():
    model = fused()
    expected = model(X)
    for args, kwargs in (((X, 2.0), {}), ((X,), {"scale": 2.0}), ((), {"x": X, "scale": 2.0})):
        y, calls, _ = gemms(model, *args, **kwargs)
        assert calls == 1 and sqnr_db(expected.detach() * 2, y.detach()) > 35
    assert users_forward_runs(model, x=X)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model()


# --- with the rest of PyTorch ---------------------------------------------------------------------------------------


def results(model: nn.Module, run=None) -> list[Tensor]:
    x = X.clone().requires_grad_()
    model.zero_grad()
    y = (model if run is None else run)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", ["folded", "block"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_is_bit_for_bit_eager(recipe, autocast):
    model = fused(recipe=recipe)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert same(results(model), results(model, compiled))
    with kernels.record() as ledger:
        results(model, compiled)
    assert sum(ledger.gemms.values()) == 7 and not model.calls
    torch._dynamo.reset()


def test_compiled_in_place_follows_the_weights():
    model = fused()
    model.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        assert torch.equal(model(X), model.forward(X))
        model(X).sum().backward()
        optimizer.step()
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model = fused()
    assert same(results(model), results(model, lambda x: checkpoint(model, x, use_reentrant=reentrant)))


def test_the_inputs_of_the_activation_in_fp8():
    model, wide = fused(), fused()
    fuse_again = copy.deepcopy(wide)
    model.release()
    fuse(model, ROLES, "fp8")
    model.load_state_dict(wide.state_dict())
    y, dx, *_ = results(model)
    assert torch.equal(y, results(wide)[0]) and not torch.equal(dx, results(wide)[1])
    assert "activation=silu, activation_inputs=fp8" in repr(model) and "activation_inputs" not in repr(wide)
    assert same(results(pickle.loads(pickle.dumps(model))), results(model))
    model.release()
    fuse(model, ROLES)
    assert same(results(model), results(fuse_again))


@pytest.mark.parametrize("cls", [FeedForward, Custom])
@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy], ids=["deep", "shallow"])
def test_copies_are_fused(cls, make):
    model = fused(cls)
    twin = make(model)
    assert type(twin) is type(model) and twin.mlp_roles == ROLES
    assert hasattr(twin, "copied") == (cls is Custom)
    assert not users_forward_runs(twin, X) and torch.equal(twin(X), model(X))
    twin.release()
    assert type(twin) is cls and isinstance(model, FusedMLP) and not users_forward_runs(model, X)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_files_hold_the_whole_module(protocol):
    model, file = fused(), io.BytesIO()
    torch.save(model, file, pickle_protocol=protocol)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert type(twin) is type(model)
    assert not users_forward_runs(twin, X) and torch.equal(twin(X), model(X))


class Registered(FeedForward):
    def __reduce__(self):
        return Registered, ()


def test_a_class_that_says_how_it_is_made_is_made_so():
    model = fused(Registered)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is Registered


def test_state_dict_goes_between_fused_and_plain():
    model, other = fused(), FeedForward()
    other.load_state_dict(model.state_dict())
    model.load_state_dict(FeedForward().state_dict())
    expected = plain_twin(model)(X)
    assert sqnr_db(expected.detach(), model(X).detach()) > 35


def test_functional_call_uses_the_weights_it_is_given():
    model = fused()
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, others, (X,))
    model.load_state_dict(others)
    assert torch.equal(got, model(X))


# --- groups of layers that are computed as one -----------------------------------------------------------------------


def named(model, layers):
    names = {id(module): name for name, module in model.named_modules()}
    return [[names[id(layer)] for layer in group] for group in fusion_groups(model, layers)]


def llama(**policy):
    model = Llama(ModelConfig(vocab=64, dim=64, layers=1, heads=2, ffn=96, sequence=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    octavo.convert(model, policy=octavo.Policy(**policy))
    return model, [module for module in model.modules() if isinstance(module, Linear)]


def test_what_shares_an_input_is_one_group():
    groups = named(*llama())
    attention, mlp = "layers.0.attention.", "layers.0.feed_forward."
    assert sorted(groups) == sorted(
        [[f"{mlp}w1", f"{mlp}w3"], [f"{attention}w{n}" for n in "qkv"], [f"{attention}wo"], [f"{mlp}w2"]]
    )


def test_a_group_that_lacks_a_member_is_none():
    model, layers = llama()
    groups = named(model, [layer for layer in layers if layer is not model.layers[0].attention.wk])
    assert ["layers.0.attention.wq"] in groups and ["layers.0.attention.wv"] in groups


def test_layers_that_are_not_fused_are_alone():
    assert all(len(group) == 1 for group in named(*llama(fuse=False)))
