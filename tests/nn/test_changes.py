"""What changes between two calls changes compiled code, replays and experts as it changes eager code.

Compiled code has few guards, and a recording a short key: these changes are what they have to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo import Policy, kernels
from octavo.kernels.runtime import tape
from octavo.nn import GroupedLinear, reuse_weight_codes
from octavo.nn.telemetry import Telemetry
from octavo.recipes import load

WIDTH, EXPERTS = 32, 3


class Dense(nn.Module):
    """Three layers that share their input, one alone, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i == 1) for i in range(4))
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.q(x) * self.k(x).sigmoid() + self.v(x))
        return x + self.mlp(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Grouped(nn.Module):
    """A linear layer per expert, each with a third of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(EXPERTS, WIDTH, WIDTH)
        self.register_buffer("ends", torch.tensor([8, 8, 24], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, self.ends)
        return y


@pytest.fixture(autouse=True)
def _recorded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Record on a CPU what is recorded on a GPU, under the same conditions."""
    monkeypatch.setattr(tape, "_is_launched_here", lambda x: True)
    tape._recordings.clear()
    torch._dynamo.reset()
    yield
    tape._recordings.clear()
    torch._dynamo.reset()


def recipe(name: str) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    @contextmanager
    def change(model: nn.Module) -> Iterator[None]:
        before = {module: module.recipe for module in model.modules() if hasattr(module, "recipe")}
        for module in before:
            module.recipe = load(name)
        yield
        for module, own in before.items():
            module.recipe = own

    return change


@contextmanager
def one_recipe(model: nn.Module) -> Iterator[None]:
    module: Any = getattr(model, "k", None) or getattr(model, "experts", None)
    own, module.recipe = module.recipe, load("rowwise")
    yield
    module.recipe = own


@contextmanager
def low_memory(model: nn.Module) -> Iterator[None]:
    if isinstance(model, Grouped):
        yield
        return
    octavo.convert(model, "rowwise", policy=Policy(min_gain=0.0, memory="low"))
    yield
    octavo.convert(model, "folded", policy=Policy(min_gain=0.0))


@contextmanager
def dtype(model: nn.Module) -> Iterator[None]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(torch.bfloat16)
    yield
    model.to(torch.float32)
    model.load_state_dict(before)


CHANGES: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "recipe": recipe("rowwise"),
    "recipe with fast sums": recipe("folded_fast"),
    "recipe of one layer": one_recipe,
    "disabled": octavo.disabled,
    "telemetry": Telemetry,
    "policy": low_memory,
    "gemm_by": lambda model: kernels.gemm_by("exact"),
    "gemm_by slow": lambda model: kernels.gemm_by("slow"),
    "ledger": lambda model: kernels.record(),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "dtype": dtype,
    "weight codes": reuse_weight_codes,
    "no gradients": lambda model: torch.no_grad(),
}
Recompiles = Callable[..., bool]
EFFECT = {"recipe", "recipe of one layer", "disabled", "policy", "gemm_by", "autocast", "dtype"}
"""Changes with an effect on the results on a CPU."""


def step(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    """Return the output for the same input each time, and all gradients."""
    parameters = list(model.parameters())
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)).to(parameters[0].dtype).requires_grad_()
    y = run(x)
    if not y.requires_grad:
        return [y]
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)]


def eager(model: nn.Module) -> list[Tensor]:
    """Return `step` of neither compiled code nor a replay."""
    with kernels.record():
        return step(model, model)


def different(one: Tensor, other: Tensor) -> bool:
    return one.dtype != other.dtype or not torch.equal(one, other)


def assert_same(ours: list[Tensor], theirs: list[Tensor], when: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None and b is None) or (not different(a, b)), when


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    if kind is Dense:
        octavo.convert(model, "folded", policy=Policy(min_gain=0.0))
    return model


@pytest.mark.parametrize("kind", [Dense, Grouped])
def test_compiled_code_notices_a_change_that_has_an_effect(kind: type[nn.Module], recompiles: Recompiles) -> None:
    model = made(kind)
    run, plain = torch.compile(model, backend="eager", fullgraph=True), eager(model)
    assert_same(step(run, model), plain, "at first")
    for name, change in CHANGES.items():
        results: list[list[Tensor]] = []
        with change(model):
            changed = eager(model)
            if not recompiles(lambda results=results: results.append(step(run, model))):
                assert_same(results[0], changed, name)
        assert_same(step(run, model), plain, f"after {name}")


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        (Dense, False),
        (Grouped, False),
        pytest.param(Dense, True, marks=pytest.mark.slow),  # compiled anew by every change
        pytest.param(Grouped, True, marks=pytest.mark.slow),
    ],
)
def test_a_change_has_the_effect_that_it_has_in_eager_mode(kind: type[nn.Module], compiled: bool) -> None:
    model = made(kind)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    plain = eager(model)
    with torch._dynamo.config.patch(recompile_limit=64):
        for name, change in CHANGES.items():
            for _ in range(3):
                assert_same(step(run, model), plain, f"before {name}")
            with change(model):
                changed = eager(model)
                if isinstance(model, Dense) and name != "recipe with fast sums":
                    assert any(map(different, changed, plain)) == (name in EFFECT), name
                for _ in range(3):
                    assert_same(step(run, model), changed, name)
            assert_same(step(run, model), plain, f"after {name}")
