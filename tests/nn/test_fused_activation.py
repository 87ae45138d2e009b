"""Gated MLPs whose activation is one kernel: what it computes, what it saves, what is left to the module itself.

On a CPU nothing is gained by it, so tests say that it is (`gains`), and the reference kernels run.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn import fused_activation
from octavo.nn.fused import MLPRoles
from octavo.nn.fused_activation import FusedActivation, activated, adopt

WIDTH, HIDDEN = 16, 24
ROLES = MLPRoles("silu", ("gate", "up"), "down")
FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down, self.activation = nn.Linear(HIDDEN, WIDTH), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.fixture
def gains(monkeypatch):
    """Say that the kernels gain something here, and count their calls."""
    calls = []
    monkeypatch.setattr(fused_activation, "gains_by_kernels", lambda device: True)
    kernel = fused_activation.activate_plain
    monkeypatch.setattr(fused_activation, "activate_plain", lambda *given: (calls.append(given), kernel(*given))[1])
    return calls


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_float64_rounded_once(kind, dtype):
    gate, up, dh = (3 * torch.randn(2, 5, HIDDEN).to(dtype) for _ in range(3))
    leaves, exact = [[x.to(d, copy=True).requires_grad_() for x in (gate, up)] for d in (dtype, torch.float64)]
    h, want = activated(kind, *leaves), FORMULAS[kind](exact[0]) * exact[1]
    h.backward(dh)
    want.backward(dh.double())
    for got, exactly in zip((h, *(x.grad for x in leaves)), (want, *(x.grad for x in exact)), strict=True):
        assert got.dtype == dtype and got.shape == exactly.shape
        bound = (0.5 * torch.finfo(dtype).eps + 4e-6) * exactly.abs() + 4e-6  # far out, 1 - sigmoid and 1 + erf cancel
        assert bool(((got.double() - exactly).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH), (2, 0, WIDTH), (2, 3, WIDTH)], ids=str)
def test_a_module_computes_what_it_did_and_saves_less(shape, gains):
    module, sizes, results = Gated(), [], []
    x, dy = torch.randn(shape), torch.randn(shape)
    for fused in (False, True):
        if fused:
            adopt(module, ROLES)
        kept, leaf = {}, x.clone().requires_grad_()
        module.zero_grad()
        pack = lambda t, kept=kept: (kept.setdefault(t.data_ptr(), t), t)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(leaf)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        sizes.append(sum(t.numel() for t in kept.values() if not isinstance(t, nn.Parameter)))
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want)
    assert len(gains) == 1 and sizes[0] - sizes[1] == x.numel() // WIDTH * HIDDEN  # f(gate)
    module.release()
    assert type(module) is Gated


def test_hooks_of_layers_run_and_those_inside_leave_it_to_the_module(gains):
    module, x, seen = Gated(), torch.randn(3, WIDTH), []
    adopt(module, ROLES)
    want = module(x)
    for name, calls in (("gate", 2), ("down", 3), ("activation", 3)):
        handle = module.get_submodule(name).register_forward_hook(lambda layer, args, y: seen.append(layer))
        torch.testing.assert_close(module(x), want)
        assert seen.pop() is module.get_submodule(name) and not seen and len(gains) == calls
        handle.remove()


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "activation", nn.ReLU()),
        lambda module: setattr(module, "enabled", False),
        lambda module: module.double(),
        lambda module: module.up.double(),
    ],
    ids=["another activation", "disabled", "FP64", "dtypes that differ"],
)
def test_what_is_left_to_the_module(change, gains):
    module, x = Gated(), torch.randn(3, WIDTH)
    adopt(module, ROLES)
    change(module)
    x = x.to(module.gate.weight.dtype)
    if module.up.weight.dtype != x.dtype:
        with pytest.raises(RuntimeError, match="dtype"):
            module(x)
    else:
        assert torch.equal(module(x), Gated.forward(module, x))
    assert not gains


def test_layers_are_called_once_where_no_kernel_takes_their_results(gains):
    module, calls = Gated().double(), []
    adopt(module, ROLES)
    module.gate.register_forward_hook(lambda *_: calls.append(1))
    module(torch.randn(3, WIDTH).double())
    assert len(calls) == 1 and not gains


def test_everything_on_a_cpu_and_in_compiled_code(monkeypatch):
    module, x = Gated(), torch.randn(3, WIDTH)
    want = module(x)
    adopt(module, ROLES)
    assert torch.equal(module(x), want)
    monkeypatch.setattr(fused_activation, "gains_by_kernels", None)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), want)


def test_copies_and_files(gains):
    module, x, file = Gated(), torch.randn(3, WIDTH), io.BytesIO()
    adopt(module, ROLES)
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert isinstance(other, FusedActivation) and torch.equal(other(x), module(x))
    assert len(gains) == 4 and "activation=silu" in repr(module)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    module, x = Gated().to("cuda", dtype), torch.randn(70, WIDTH, device="cuda", dtype=dtype)
    parent, results = copy.deepcopy(module), []
    adopt(module, ROLES)
    for run in (module, parent):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = run(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
