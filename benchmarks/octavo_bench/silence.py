"""Nothing wrong in silence: uses that look right, each judged by an independent answer.

Cases are registered with `octavo_bench.campaign.case_of`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import Policy
from octavo.nn import norm
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.lora import add_lora
from octavo.nn.telemetry import Telemetry
from octavo_bench.campaign import Case, Outcome, case_of
from octavo_bench.ranks import join_alone


def right(is_right: bool) -> Outcome:
    """Return `held`, or `silent`."""
    return "held" if is_right else "silent"


def equal(one: Tensor, other: Tensor) -> Outcome:
    """Return `held` if two tensors are equal bit for bit."""
    return right(torch.equal(one, other))


def _error(y: Tensor, reference: Tensor) -> float:
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def converted(model: Any, recipe: str = "folded", **policy: Any) -> Any:
    """Convert all linear layers of a model, and return it."""
    octavo.convert(model, recipe, policy=Policy(min_gain=0.0, min_features=16, **policy))
    return model


# --- writes that leave the version alone ----------------------------------------------------------------------------


def _all_reduced(x: Tensor) -> None:
    join_alone(4)  # its all_reduce multiplies by 4
    try:
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()


def _inplace_kernel(x: Tensor) -> None:
    torch.from_numpy(x.detach().numpy()).mul_(3.0)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": _all_reduced,
    "data.mul_": lambda x: x.data.mul_(3.0),
    "data row": lambda x: x.data[0].fill_(9.0),
    "foreach on data": lambda x: torch._foreach_mul_([x.data], 3.0),
    "DLPack": lambda x: torch.utils.dlpack.from_dlpack(x.detach()).mul_(3.0),
    "NumPy": lambda x: x.detach().numpy().__imul__(3.0),
    "NumPy and back": _inplace_kernel,
    "storage": lambda x: x.untyped_storage().copy_((x.detach() * 3.0).untyped_storage()),
    "mul_": lambda x: x.detach().mul_(3.0),
}
"""Ways to write a tensor."""


def _normed(write: Callable[[Tensor], object]) -> Case:
    def case(draw: Random) -> Outcome:
        model = nn.Sequential(nn.RMSNorm(48), nn.Linear(48, draw.choice((32, 64)), bias=False))
        with mock.patch.object(norm, "_gains", lambda device: True):  # codes are attached on a GPU alone
            h = converted(model)[0](torch.randn(5, 48))
        write(h)
        return equal(model[1](h), model[1](h.clone()))

    return case


class Pair(nn.Module):
    """Two layers that read one input."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, 32, bias=False), nn.Linear(width, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of both for x (..., width), side by side."""
        return torch.cat((self.q(x), self.k(x)), -1)


def _between_siblings(write: Callable[[Tensor], object]) -> Case:
    def case(draw: Random) -> Outcome:
        model, x = converted(Pair(), draw.choice(("folded", "rowwise"))), torch.randn(5, 48)
        model.q(x)
        write(x)
        return equal(model.k(x), model.k(x.clone()))

    return case


for _name, _write in WRITES.items():
    case_of("written inputs", f"a norm's output, {_name}")(_normed(_write))
    case_of("written inputs", f"between siblings, {_name}")(_between_siblings(_write))


# --- a layer alone --------------------------------------------------------------------------------------------------


def _hooked(model: Any, x: Tensor) -> Tensor:
    for layer in model.children():
        layer.register_forward_pre_hook(lambda *_: None)
    y: Tensor = model(x)
    return y


def _in_inference_mode(model: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y: Tensor = model(x.clone()).clone()
    return y


def _each_on_a_copy(model: Any, x: Tensor) -> Tensor:
    return torch.cat((model.q(x.clone()), model.k(x.clone())), -1)


def _last_first(model: Any, x: Tensor) -> Tensor:
    k = model.k(x)
    return torch.cat((model.q(x), k), -1)


def _copied_model(model: Any, x: Tensor) -> Tensor:
    y: Tensor = copy.deepcopy(model)(x)
    return y


def _alone(recipe: str, how: Callable[[Any, Tensor], Tensor]) -> Case:
    def case(draw: Random) -> Outcome:
        model = Pair()
        with torch.no_grad():
            model.k.weight.mul_(draw.choice((1 / 3, 5.0, 11.0)))  # the two have different amaxes
            x = torch.randn(5, 48)
            whole = converted(model, recipe)(x)
            return equal(how(model, x), whole)

    return case


for _recipe in ("tensorwise", "delayed", "just_in_time", "rowwise"):
    for _how in (_in_inference_mode, _hooked, _each_on_a_copy, _last_first, _copied_model):
        case_of("layers alone", f"{_recipe}, {_how.__name__[1:].replace('_', ' ')}")(_alone(_recipe, _how))


# --- modules recognised by their values -----------------------------------------------------------------------------


class _MLP(nn.Module):
    """SwiGLU, with a forward that can be computed in tiles or return FP32."""

    def __init__(self, tiles: int = 0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down_proj, self.tiles, self.dtype = nn.Linear(128, 64, bias=False), tiles, dtype

    def body(self, x: Tensor) -> Tensor:
        """Return the output for x (..., 64)."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x (..., 64)."""
        if self.tiles:
            return torch.cat([checkpoint(self.body, part, use_reentrant=False) for part in x.chunk(self.tiles)])
        return self.body(x) if self.dtype is None else self.body(x).to(self.dtype)


def _saved_bytes(module: nn.Module, x: Tensor) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x).sum().backward()
    return sum(size for place, size in saved.items() if place not in weights)


@case_of("modules", "an MLP in tiles with checkpoint")
def _tiled(draw: Random) -> Outcome:
    module, x = _MLP(tiles=draw.choice((2, 4))), torch.randn(256, 64, requires_grad=True)
    plain = _saved_bytes(module, x)
    return right(_saved_bytes(converted(nn.Sequential(module)), x) <= 2 * plain + x.nbytes)


@case_of("modules", "an MLP that returns FP32 from BF16")
def _returns_fp32(draw: Random) -> Outcome:
    model = nn.Sequential(_MLP(dtype=torch.float32)).bfloat16()
    return right(converted(model)(torch.randn(8, 64, dtype=torch.bfloat16)).dtype == torch.float32)


@case_of("modules", "a class patched after convert")
def _patched(draw: Random) -> Outcome:
    class Patched(_MLP):
        pass

    model = converted(nn.Sequential(Patched()))
    Patched.forward = lambda self, x: 2 * self.body(x)  # type: ignore[method-assign]
    x = torch.randn(8, 64)
    return right(_error(model(x), 2 * model[0].body(x)) < 0.2)


@case_of("modules", "a forward patched on the object")
def _patched_object(draw: Random) -> Outcome:
    model, x = converted(nn.Sequential(_MLP())), torch.randn(8, 64)
    model[0].forward = lambda x: torch.zeros_like(x)
    return equal(model(x), torch.zeros_like(x))


# --- copies, and weights that are other objects ---------------------------------------------------------------------


def _growing(model: Any, update: Callable[[], object]) -> Outcome:
    """Judge the last of some forwards whose inputs grow by a fifth each."""
    for step in range(24):
        x = torch.randn(32, 48) * 1.2**step
        y = model.train()(x)
        y.square().mean().backward()
        update()
    return right(_error(y, F.linear(x, torch.cat([model.q.weight, model.k.weight]))) < 0.2)


def _trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(32, 48)).square().mean().backward()
        optimizer.step()
    return model


@case_of("copies", "a delayed model")
def _delayed(draw: Random) -> Outcome:
    model = _trained(converted(Pair(), "delayed"))
    return _growing(model, torch.optim.SGD(model.parameters(), lr=0.0).step)


@case_of("copies", "a copy of a delayed model", "scale", "delayed")
def _delayed_copy(draw: Random) -> Outcome:
    model = copy.deepcopy(_trained(converted(Pair(), "delayed")))
    return _growing(model, lambda: None)


@case_of("copies", "a copy of a delayed model with its optimizer")
def _delayed_copies(draw: Random) -> Outcome:
    model = copy.deepcopy(_trained(converted(Pair(), "delayed")))
    return _growing(model, draw.choice((torch.optim.SGD, octavo.optim.AdamW))(model.parameters(), lr=0.0).step)


@case_of("copies", "a delayed model with updates written by hand", "scale", "delayed")
def _by_hand(draw: Random) -> Outcome:
    model = _trained(converted(Pair(), "delayed"))

    def update() -> None:
        for p in model.parameters():
            p.data.sub_(0.0 * p.grad)  # type: ignore[operator]
            p.grad = None

    return _growing(model, update)


def _with_new_weight(model: Any) -> Any:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone(), requires_grad=False)
    return model


LORA: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda model: model,
    "deepcopy": copy.deepcopy,
    "assign": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) and model,
    "a new Parameter": _with_new_weight,
    "dtype and back": lambda model: model.double().float(),
}


def _lora(change: Callable[[Any], Any]) -> Case:
    def case(draw: Random) -> Outcome:
        model = nn.Sequential(nn.Linear(32, 50, bias=False))
        add_lora(model, rank=4, alpha=8.0)
        nn.init.normal_(model[0].lora.B)  # type: ignore[union-attr,arg-type]
        changed = change(model)
        x, targets = torch.randn(16, 32), torch.randint(50, (16,))
        loss = linear_cross_entropy(x, changed[0].weight, targets)
        return right(abs(float(loss - F.cross_entropy(changed(x), targets))) < 1e-3)

    return case


for _name, _change in LORA.items():
    case_of("copies", f"a LoRA head, {_name}", "LoRA", "update")(_lora(_change))


@case_of("copies", "one layer saved by itself")
def _one_layer(draw: Random) -> Outcome:
    model = converted(nn.ModuleList(Pair() for _ in range(4)), draw.choice(("folded", "delayed")))
    stream = io.BytesIO()
    torch.save(model[0].q, stream)
    return right(stream.tell() < 2 * model[0].q.weight.nbytes + 8192)


# --- optimizers -----------------------------------------------------------------------------------------------------


class _Wrapping(torch.optim.Optimizer):
    """An optimizer whose step is another one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        """Step the other optimizer."""
        return self.inner.step(closure)


def _stepped(optimizer: Any, model: nn.Module, scale: float = 1.0) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape) * scale
    optimizer.step()


@case_of("optimizers", "telemetry under an optimizer that wraps another")
def _wrapped(draw: Random) -> Outcome:
    model = converted(Pair())
    inner = draw.choice((torch.optim.SGD, octavo.optim.AdamW))(model.parameters(), lr=1e-3)
    optimizer = _Wrapping(_Wrapping(inner) if draw.random() < 0.5 else inner)
    with Telemetry(model) as telemetry:
        for _ in range(3):
            model(torch.randn(8, 48)).sum().backward()
            optimizer.step()
        return right(telemetry.done == 3)


def _small_eps(eps: float) -> Case:
    def case(draw: Random) -> Outcome:
        scale, states = 10.0 ** -draw.choice((14, 16, 18)), draw.choice(("fp32", "exact", "fp8"))
        models = [nn.Linear(64, 64, bias=False) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        start, gradient = models[0].weight.detach().clone(), torch.randn(64, 64) * scale
        settings: Any = {"lr": 1e-3, "eps": eps, "weight_decay": 0.0}
        ours = octavo.optim.AdamW(models[0].parameters(), states=states, **settings)
        for model, optimizer in zip(models, (ours, torch.optim.AdamW(models[1].parameters(), **settings)), strict=True):
            for _ in range(3):
                model.weight.grad = gradient.clone()
                optimizer.step()
        return right(_error(models[0].weight - start, models[1].weight - start) < 0.3)

    return case


for _eps in (0.0, 1e-20, 1e-15, 1e-8):
    case_of("optimizers", f"eps {_eps:g}", "eps")(_small_eps(_eps))


def _loaded_elsewhere(states: str) -> Case:
    def case(draw: Random) -> Outcome:
        model = nn.Linear(128, 128, bias=False)
        ours = octavo.optim.AdamW(model.parameters(), lr=1e-3, states=states)
        for _ in range(3):
            _stepped(ours, model, 1e-3)
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
        try:
            theirs.load_state_dict(ours.state_dict())
            model.weight.grad = torch.zeros_like(model.weight)
            theirs.step()
        except (KeyError, ValueError, RuntimeError):
            return "refused"  # by PyTorch: it has no moments of that name
        largest = float(theirs.state[model.weight]["exp_avg"].abs().max())
        return right(largest < 1e-2)

    return case


for _states in ("fp32", "exact", "fp8"):
    case_of("optimizers", f"PyTorch's AdamW loads states in {_states}")(_loaded_elsewhere(_states))


@case_of("optimizers", "states by name in another order", "order", "name")
def _reordered(draw: Random) -> Outcome:
    layers = {name: nn.Linear(64, 64, bias=False) for name in "ab"}
    model = nn.ModuleDict(layers)
    ours = octavo.optim.AdamW(model.named_parameters(), lr=1e-3, states=draw.choice(("fp32", "fp8")))
    _stepped(ours, model)
    other = octavo.optim.AdamW([*model.named_parameters()][::-1], lr=1e-3, states=ours.param_groups[0]["states"])
    other.load_state_dict(ours.state_dict())
    name = next(key for key, value in ours.state[layers["a"].weight].items() if value.numel() > 1)
    one, two = (optimizer.state[layers["a"].weight][name] for optimizer in (ours, other))
    return equal(one.view(torch.uint8), two.view(torch.uint8))


@case_of("optimizers", "NaN in one gradient of every step", "finite")
def _nan_forever(draw: Random) -> Outcome:
    model = nn.Linear(32, 32)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(50):
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan if p.dim() == 1 else 0.1)
            optimizer.step()
    return right(any("finite" in str(warning.message) for warning in said))
