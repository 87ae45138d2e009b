"""A change in what a recognised module holds: its own forward runs, and a warning says why."""

import copy
import dataclasses
import io
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.nn.fused import FusedMLP
from octavo.nn.norm import adopt

X = torch.randn(8, 64)


@dataclasses.dataclass(slots=True)
class Slots:
    dropout: float = 0.0
    unread: int = 1


class WithProperty:
    unread = 1

    def __init__(self) -> None:
        self._dropout = 0.0

    @property
    def dropout(self) -> float:
        return self._dropout

    @dropout.setter
    def dropout(self, value: float) -> None:
        self._dropout = value


def transformers_config():
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=64, intermediate_size=128)
    config.dropout = 0.0
    return config


CONFIGS = {
    "namespace": lambda: SimpleNamespace(dropout=0.0, unread=1),
    "slots": Slots,
    "property": WithProperty,
    "dictionary": lambda: {"dropout": 0.0, "unread": 1, "other": object()},
    "transformers": transformers_config,
}
configs = pytest.mark.parametrize("config", CONFIGS)


def change(config, name: str, value: float) -> None:
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)


class Configured(nn.Module):
    """An MLP with a dropout whose probability is in a configuration."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down, self.cfg = nn.Linear(128, 64, bias=False), config

    @property
    def dropout(self) -> float:
        return self.cfg["dropout"] if isinstance(self.cfg, dict) else self.cfg.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), self.dropout, self.training))


class Called:
    """An activation with a number of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return F.silu(x * self.factor)


def activate(config, x: Tensor) -> Tensor:
    return F.silu(x * config.factor)


def wrapped(forward):
    def wrapper(self, x):
        return forward(self, x) * self.cfg.factor

    return wrapper


class ByObject(Configured):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.cfg(self.gate(x)) * self.up(x))


class ByFunction(Configured):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.cfg, self.gate(x)) * self.up(x))


class ByMethod(Configured):
    def activate(self, x: Tensor) -> Tensor:
        (y,) = [F.silu(each * self.cfg.factor) for each in (x,)]
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate(x)) * self.up(x))


class ByName(Configured):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * getattr(self.cfg, "factor", 1.0)


class ByWrapper(Configured):
    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def converted(module: nn.Module) -> FusedMLP:
    octavo.convert(module, policy=octavo.Policy(min_features=8))
    assert isinstance(module, FusedMLP) and module.is_as_recognised()
    return module


@configs
def test_a_change_inside_a_configuration_is_computed_and_said(config, caplog, monkeypatch):
    monkeypatch.setattr("octavo.kernels.runtime.ledger._warned", set())
    held = CONFIGS[config]()
    module = converted(Configured(held))
    assert torch.equal(module(X), module(X))
    change(held, "dropout", 0.9)
    assert not torch.equal(module(X), module(X))
    name = "_dropout" if config == "property" else "dropout"
    assert f"FusedConfigured.cfg.{name} has changed since octavo.convert" in caplog.text


@configs
def test_a_field_that_the_code_does_not_name_may_change(config):
    held = CONFIGS[config]()
    module = converted(Configured(held))
    change(held, "unread", 2)
    assert module.is_as_recognised()


@pytest.mark.parametrize("cls", [ByObject, ByFunction, ByMethod, ByName, ByWrapper])
def test_a_field_is_noticed_wherever_the_code_reads_it(cls):
    held = Called()
    module = converted(cls(held))
    held.factor = 2.0
    assert not module.is_as_recognised()


def test_the_way_in_which_transformers_computes_may_change():
    class Way(Configured):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.cfg._experts_implementation else x

    held = SimpleNamespace(dropout=0.0, _experts_implementation="grouped_mm")
    module = converted(Way(held))
    held._experts_implementation = "batched_mm"  # as `generate` does
    assert module.is_as_recognised()


@configs
@torch.no_grad()
def test_a_changed_field_is_noticed_in_compiled_code(config, recompiles):
    held = CONFIGS[config]()
    run = torch.compile(converted(Configured(held)), backend="eager", fullgraph=True)
    assert torch.equal(run(X), run(X))
    change(held, "unread", 2)
    assert not recompiles(run, X)
    change(held, "dropout", 0.9)
    assert recompiles(run, X)
    torch._dynamo.reset()


# --- code that is replaced after the conversion ---------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (Projection(64, 96, bias=False) for _ in range(2))
        self.down = Projection(96, 64)
        self.act = Activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        return times(self.act(self.gate(x)), self.up(x))


class Patchable(Base):
    """With a forward that it inherits."""


class Projection(nn.Linear):
    pass


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


def times(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def other_forward(self, x):
    return x * 0 + 7


def other_code(self, x):
    return x * 0 + 7


def doubled(self, x):
    return 2 * self.act(self.gate(x)) * self.up(x)


HERE = sys.modules[__name__]
PATCHES = {
    "forward": (Patchable, "forward", other_forward),
    "forward of a base": (Base, "forward", other_forward),
    "method": (Patchable, "inner", doubled),
    "method of a base": (Base, "inner", doubled),
    "child": (Activation, "forward", lambda self, x: x),
    "child's call": (Activation, "__call__", lambda self, x: x),
    "layer": (Projection, "forward", lambda self, x: F.linear(x, 2 * self.weight, self.bias)),
    "PyTorch's layer": (nn.Linear, "forward", lambda self, x: F.linear(x, 2 * self.weight, self.bias)),
    "function": (HERE, "times", lambda a, b: a + b),
    "code": (Base.forward, "__code__", other_code.__code__),
    "code of a method": (Base.inner, "__code__", doubled.__code__),
}


COMPILED = ("forward", "layer", "code")


@pytest.mark.parametrize(
    ("patch", "compiled"),
    [*((patch, False) for patch in PATCHES.values()), *((PATCHES[name], True) for name in COMPILED)],
    ids=[*PATCHES, *(f"{name}, compiled" for name in COMPILED)],
)
@torch.no_grad()
def test_code_that_is_replaced_after_the_conversion_runs(patch, compiled, monkeypatch, caplog):
    model = converted(Patchable())
    run = torch.compile(model, backend="eager") if compiled else model
    before = run(X)
    with monkeypatch.context() as patched:
        patched.setattr(*patch)
        y = run(X)
        assert not model.is_as_recognised()
        plain = copy.deepcopy(model)
        octavo.revert(plain)
        assert torch.allclose(y, plain(X), rtol=0.1, atol=0.1 * float(plain(X).abs().max()))
        assert not torch.allclose(before, plain(X), rtol=0.1, atol=0.1 * float(plain(X).abs().max()))
    assert torch.equal(model(X), before)  # the patch has gone
    if compiled:
        torch._dynamo.reset()


def test_a_patched_norm_runs(monkeypatch):
    class Norm(nn.RMSNorm):
        pass

    module = Norm(64)
    adopt(module, None)
    assert module.is_as_recognised()
    monkeypatch.setattr(Norm, "forward", other_forward)
    assert not module.is_as_recognised() and torch.equal(module(X), torch.full_like(X, 7.0))


def test_a_copy_and_a_file_notice_too(monkeypatch):
    model = converted(Patchable())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = copy.deepcopy(model), torch.load(file, weights_only=False)
    for twin in twins:
        assert torch.equal(twin(X), model(X))
    monkeypatch.setattr(Patchable, "forward", other_forward)
    for twin in twins:
        assert torch.equal(twin(X), torch.full_like(X, 7.0))


def test_converted_again_a_patched_module_is_judged_anew(monkeypatch):
    model = converted(Patchable())
    monkeypatch.setattr(Patchable, "forward", other_forward)
    octavo.convert(model, policy=octavo.Policy(min_features=8))
    assert not isinstance(model, FusedMLP) and torch.equal(model(X), torch.full_like(X, 7.0))
