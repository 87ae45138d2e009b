"""Faults that `octavo bench faults` injects: six classes, each sudden, moderate, slow and repeated.

A fault is called before each step with `n`, the number of steps since the struck one (negative before). A fault with
`at` strikes once at each of these steps, so that repeated steps are clean; any other lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from octavo.nn.scaling_state import scales

if TYPE_CHECKING:
    from octavo_bench.faults import Struck

CLASSES = ("data", "weights", "moments", "gradients", "codes and scales", "configuration")
Pace = Literal["sudden", "moderate", "slow", "repeated"]
Strike = Callable[["Struck", int], object]

EXPONENT_BIT, LOW_EXPONENT_BIT = 30, 24
"""Bits of an FP32 element: the highest exponent bit multiplies a value below 2 by 2^128, the low one scales by 4."""
SPIKE = 2000.0
"""Size of a SwiGLU spike, as a multiple of the largest element."""
TOKEN, ROW, COLUMN = 7, 3, 5
WO, W1, W2, W3 = (
    "layers.1.attention.wo",
    "layers.2.feed_forward.w1",
    "layers.1.feed_forward.w2",
    "layers.0.feed_forward.w3",
)
WQ = "layers.1.attention.wq"
ALWAYS = range(10**9)


@dataclass(frozen=True)
class Fault:
    """A fault injected into a run."""

    name: str
    """Name in the table."""
    kind: str
    """One of `CLASSES`."""
    pace: Pace
    cause: str
    """Expected cause, one of `octavo.lab.guard.diagnosis.Cause`."""
    layer: str = ""
    """Expected layer; empty if no layer is at fault."""
    strike: Strike | None = None
    """Changes the run before a step."""
    at: Collection[int] | None = None
    """Steps to strike, once each; None: called before every step, including those before the struck one."""
    prepare: Callable[[Struck], None] | None = None
    """Changes the run at its start."""
    recipe: str = "folded"
    baseline: bool = False
    """Whether the run has a BF16 baseline."""


# --- data ------------------------------------------------------------------------------------------------------------


class _Batches:
    """Loader of a run that changes some batches whenever they are read; `n` counts from the strike."""

    def __init__(self, run: Struck, change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._loader, self._change, self._batch = run.setup.loader, change, run.config.run.batch
        self._first = run.struck_at - 1 - run.state.done + self._loader.state_dict()["samples"] // self._batch
        self.n = -1
        """Number of the last batch read."""

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.n = self._loader.state_dict()["samples"] // self._batch - self._first
        inputs, targets = next(self._loader)
        return self._change(self.n, inputs, targets) if self.n >= 0 else (inputs, targets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _noise(run: Struck, share: Callable[[int], float]) -> None:
    """Replace a share of the tokens of batch `n` by random ones."""

    def change(n: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(n)
        is_noise = torch.rand(inputs.shape, generator=draw) < share(n)
        drawn = (torch.randint(run.config.model.vocab, inputs.shape, generator=draw) for _ in range(2))
        return tuple(torch.where(is_noise, new, old) for new, old in zip(drawn, (inputs, targets), strict=True))  # type: ignore[return-value]

    run.setup.loader = _Batches(run, change)  # type: ignore[assignment]


def _poisoned(*batches: int, share: float = 1.0) -> Callable[[Struck], None]:
    return lambda run: _noise(run, lambda n: share if n in batches else 0.0)


def _harder(share: float, over: int = 1) -> Callable[[Struck], None]:
    return lambda run: _noise(run, lambda n: share * min((n + 1) / over, 1.0))


def _targets_off_by_one(run: Struck) -> None:
    def change(n: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, targets.roll(7, 1) if n == 0 else targets

    run.setup.loader = _Batches(run, change)  # type: ignore[assignment]


def _repeats(count: int) -> Callable[[Struck], None]:
    """Return the same batch `count` times."""

    def prepare(run: Struck) -> None:
        kept: list[tuple[Tensor, Tensor]] = []

        def change(n: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            if n == 0 or not kept:
                kept[:] = [(inputs, targets)]
            return kept[0] if n < count else (inputs, targets)

        run.setup.loader = _Batches(run, change)  # type: ignore[assignment]

    return prepare


def _inf_in_a_token(run: Struck) -> None:
    """Put an infinity into one token of a layer's input, whenever it reads the struck batch."""
    batches = _Batches(run, lambda n, *batch: batch)
    run.setup.loader = batches  # type: ignore[assignment]

    def pre(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if batches.n != 0:
            return args
        x = args[0].clone()
        x.view(-1, x.shape[-1])[TOKEN, COLUMN] = torch.inf
        return (x, *args[1:])

    run.model.get_submodule(W1).register_forward_pre_hook(pre)


# --- weights ---------------------------------------------------------------------------------------------------------


def _weight(layer: str, change: Callable[[Tensor], object]) -> Strike:
    return lambda run, n: change(run.weight(layer))


def _flip(bit: int, layer: str = W1) -> Strike:
    def strike(run: Struck, n: int) -> None:
        run.weight(layer).view(torch.int32)[ROW, COLUMN] ^= 1 << bit

    return strike


def _row(factor: float) -> Callable[[Tensor], object]:
    return lambda weight: weight[ROW].mul_(factor)


def _half(weight: Tensor) -> None:
    weight[: len(weight) // 2] = 0


def _noisy(weight: Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=draw)


def _nan_in_a_rare_token(run: Struck, n: int) -> None:
    run.weight("tok_embeddings")[250, COLUMN] = torch.nan


def _swap_at_resume(run: Struck, n: int) -> None:
    """Save and load the state of guardrails, as a resume does, with two layers swapped in between."""
    guard = run.guard
    state = guard.state_dict()
    one, other = run.weight(WO), run.weight("layers.2.attention.wo")
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    guard.load_state_dict(state)


def _drift(run: Struck, n: int) -> None:
    if n >= 0:
        run.weight("layers.1.ffn_norm").mul_(1.01)


# --- moments ---------------------------------------------------------------------------------------------------------


def _moments(layer: str, **factors: float) -> Strike:
    """Multiply the moments of a layer, or of all for an empty name."""

    def strike(run: Struck, n: int) -> None:
        for name, state in run.moments():
            if not layer or name == f"{layer}.weight":
                for key, factor in factors.items():
                    state[key].mul_(factor)

    return strike


def _nan_moment(run: Struck, n: int) -> None:
    next(state for name, state in run.moments() if name == f"{WO}.weight")["exp_avg"].view(-1)[ROW] = torch.nan


def _moments_swapped(run: Struck, n: int) -> None:
    """Exchange the moments of two layers, as a file with another order of parameters does."""
    states = dict(run.moments())
    one, other = (states[f"layers.{layer}.attention.wo.weight"] for layer in (1, 2))
    for key in ("exp_avg", "exp_avg_sq"):
        kept = one[key].clone()
        one[key].copy_(other[key])
        other[key].copy_(kept)


def _codes_as_values(run: Struck, n: int) -> None:
    """Take the codes of first moments, whose largest is 448, as values."""
    for _, state in run.moments():
        moment = state["exp_avg"]
        moment.mul_(448.0 / moment.abs().amax().clamp(min=1e-30))


# --- gradients -------------------------------------------------------------------------------------------------------


def _gradient(layer: str, change: Callable[[Tensor], object], at: Collection[int]) -> Callable[[Struck], None]:
    """Change the gradient of a layer, or of all for an empty name, in steps `at`; `ALWAYS` includes repeated ones."""

    def prepare(run: Struck) -> None:
        made: set[int] = set()

        def hook(parameter: Tensor) -> None:
            n = run.state.done - run.struck_at if run.is_stepping else run.state.done + 1 - run.struck_at
            if n in at and parameter.grad is not None and (at is ALWAYS or n not in made):
                change(parameter.grad)

        def after(n: int) -> None:
            made.add(n)

        run.after_update = after
        for name, parameter in run.model.named_parameters():
            if not layer or name == f"{layer}.weight":
                parameter.register_post_accumulate_grad_hook(hook)

    return prepare


def _nan_gradient(gradient: Tensor) -> None:
    gradient.view(-1)[0] = torch.nan


# --- codes and scales ------------------------------------------------------------------------------------------------


def _swiglu_spike(run: Struck) -> None:
    """Let one token's hidden activation spike from a step on, without an effect in high precision.

    The output of that token stays the same: the spike only shares a tensor with the others.
    """
    layer = run.model.get_submodule(W2)
    plain: list[Tensor] = []

    def spike(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        plain.clear()
        if run.state.done + 1 < run.struck_at:
            return args
        x = args[0].clone()
        rows = x.view(-1, x.shape[-1])
        plain.append(rows[TOKEN].clone())
        rows[TOKEN] = rows[TOKEN] * 0 + SPIKE * rows.detach().abs().amax()
        return (x, *args[1:])

    def without(module: nn.Module, _: Any, y: Tensor) -> Tensor | None:
        if not plain:
            return None
        made = y.clone()
        made.view(-1, y.shape[-1])[TOKEN] = nn.functional.linear(plain[0].to(y.dtype), module.weight.to(y.dtype))  # type: ignore[arg-type]
        return made

    layer.register_forward_pre_hook(spike)
    layer.register_forward_hook(without)


def _dequantised(
    layer: str, change: Callable[[int, Tensor], Tensor], backward: bool = False
) -> Callable[[Struck], None]:
    """Change the result of a layer's FP8 GEMM from a step on, as a wrong scale or bad codes do; BF16 stays right."""

    def prepare(run: Struck) -> None:
        def hook(module: nn.Module, _: Any, y: Tensor) -> Tensor | None:
            n = run.state.done - run.struck_at if run.is_stepping else run.state.done + 1 - run.struck_at
            if n < 0 or not getattr(module, "enabled", False):
                return None
            if backward:
                if y.requires_grad:  # not where guardrails probe
                    y.register_hook(lambda gradient: change(n, gradient))
                return None
            return change(n, y)

        run.model.get_submodule(layer).register_forward_hook(hook)

    return prepare


def _no_columns(n: int, y: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(y[..., :8]), y[..., 8:]], -1)


def _stored_scale(layer: str, factor: float, role: int = 0, every: int = 1) -> Strike:
    """Multiply the stored scale of a layer's input (role 0) or output gradient before a step."""

    def strike(run: Struck, n: int) -> None:
        slot = run.model.get_submodule(layer).scaling_slot
        if n >= 0 and n % every == 0 and scales(run.model) is not None and slot is not None:
            slot.scale_and_amax.data[role, 0] *= factor  # type: ignore[union-attr,index,operator]

    return strike


def _stored_scale_stays(layer: str) -> Strike:
    """Let the stored scale of a layer's input be that of the struck step, shrinking against its input by 5 % a step."""

    def strike(run: Struck, n: int) -> None:
        slot = run.model.get_submodule(layer).scaling_slot
        if n < 0 or slot is None:
            return
        scale = slot.scale_and_amax.data[0, 0]  # type: ignore[union-attr,index]
        start = run.originals.setdefault((id(slot), "scale"), scale.clone())
        scale.copy_(start * 0.95**n)

    return strike


def _stale_codes(layer: str) -> Callable[[Struck], None]:
    """Let a layer's FP8 GEMM read the tokens of its input in another order, as codes of an older input would be."""

    def prepare(run: Struck) -> None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            n = run.state.done - run.struck_at if run.is_stepping else run.state.done + 1 - run.struck_at
            return (args[0].roll(1, 0), *args[1:]) if n >= 0 and getattr(module, "enabled", False) else None

        run.model.get_submodule(layer).register_forward_pre_hook(hook)

    return prepare


# --- configuration ---------------------------------------------------------------------------------------------------


def _group(**changed: Any) -> Strike:
    """Set options of the optimizer from a step on; a callable is given the original value."""

    def strike(run: Struck, n: int) -> None:
        for group in run.setup.states[0].optimizer.param_groups:
            for key, value in changed.items():
                original = run.originals.setdefault((id(group), key), group[key])
                group[key] = original if n < 0 else value(original) if callable(value) else value

    return strike


def _lr(factor: Callable[[int], float]) -> Strike:
    def strike(run: Struck, n: int) -> None:
        run.times_lr = factor(n) if n >= 0 else 1.0

    return strike


def _no_steps(run: Struck, n: int) -> None:
    state = run.setup.states[0]
    step = run.originals.setdefault((id(state), "step"), state.loss_scale.step)
    state.loss_scale.step = (lambda optimizer: None) if n >= 0 else step  # type: ignore[method-assign]


def _no_clip(run: Struck, n: int) -> None:
    state = run.setup.states[0]
    state.clip = run.originals.setdefault((id(state), "clip"), state.clip) if n < 0 else 1e-4


def _faults() -> list[Fault]:
    data, weights, moments, gradients, codes, configuration = CLASSES
    once, thrice = (0,), (0, 15, 30)
    return [
        Fault("poisoned batch", data, "sudden", "data", prepare=_poisoned(0)),
        Fault("inf in a token", data, "sudden", "data", W1, prepare=_inf_in_a_token),
        Fault("targets of a batch shifted", data, "sudden", "data", prepare=_targets_off_by_one),
        Fault("a third of a batch random", data, "moderate", "data", prepare=_poisoned(0, share=0.33)),
        Fault("a tenth of all tokens random", data, "moderate", "data", prepare=_harder(0.1)),
        Fault("half of all tokens random", data, "sudden", "data", prepare=_harder(0.5)),
        Fault("noise growing to a third", data, "slow", "data", prepare=_harder(0.33, over=40)),
        Fault("two poisoned batches", data, "repeated", "data", prepare=_poisoned(0, 6)),
        Fault("nine poisoned batches", data, "repeated", "data", prepare=_poisoned(*range(0, 54, 6))),
        Fault("a batch repeated 12 times", data, "repeated", "data", prepare=_repeats(12)),
        Fault("row x 1000", weights, "sudden", "transient", WO, _weight(WO, _row(1000.0)), once),
        Fault("exponent bit flip", weights, "sudden", "transient", W1, _flip(EXPONENT_BIT), once),
        Fault("exponent bit flips", weights, "repeated", "transient", W1, _flip(EXPONENT_BIT), thrice),
        Fault("low exponent bit flip", weights, "moderate", "transient", W1, _flip(LOW_EXPONENT_BIT), once),
        Fault("row zeroed", weights, "moderate", "transient", WO, _weight(WO, _row(0.0)), once),
        Fault("half of a weight zeroed", weights, "sudden", "transient", WO, _weight(WO, _half), once),
        Fault("weight negated", weights, "sudden", "transient", WO, _weight(WO, torch.Tensor.neg_), once),
        Fault("noise on a weight", weights, "moderate", "transient", W3, _weight(W3, _noisy), once),
        Fault("NaN in a rare token", weights, "sudden", "transient", "tok_embeddings", _nan_in_a_rare_token, once),
        Fault("layers swapped at resume", weights, "sudden", "model", WO, _swap_at_resume, once),
        Fault("norm drifts 1 % per step", weights, "slow", "optimizer", "layers.1.ffn_norm", _drift),
        Fault("second moments lost", moments, "sudden", "transient", "", _moments("", exp_avg_sq=0.0), once),
        Fault("layer's second moment lost", moments, "moderate", "transient", WO, _moments(WO, exp_avg_sq=0.0), once),
        Fault("second moment / 1e4", moments, "moderate", "transient", WO, _moments(WO, exp_avg_sq=1e-4), once),
        Fault("moments lost", moments, "repeated", "transient", "", _moments("", exp_avg=0.0, exp_avg_sq=0.0), thrice),
        Fault("first moment x 100", moments, "sudden", "transient", WO, _moments(WO, exp_avg=100.0), once),
        Fault("first moment negated", moments, "moderate", "transient", WO, _moments(WO, exp_avg=-1.0), once),
        Fault("moments of two layers swapped", moments, "slow", "transient", WO, _moments_swapped, once),
        Fault("codes of moments taken as values", moments, "sudden", "transient", "", _codes_as_values, once),
        Fault("NaN in a moment", moments, "sudden", "transient", WO, _nan_moment, once),
        Fault(
            "layer's gradient x 1000", gradients, "sudden", "transient", WO,
            prepare=_gradient(WO, lambda g: g.mul_(1000.0), once),
        ),
        Fault("NaN in a gradient", gradients, "sudden", "transient", WO, prepare=_gradient(WO, _nan_gradient, once)),
        Fault(
            "NaN in gradients", gradients, "repeated", "transient", WO,
            prepare=_gradient(WO, _nan_gradient, thrice),
        ),
        Fault(
            "NaN in a gradient of every step", gradients, "slow", "optimizer", WO,
            prepare=_gradient(WO, _nan_gradient, ALWAYS),
        ),
        Fault(
            "layer's gradient x 100 from now on", gradients, "moderate", "optimizer", WO,
            prepare=_gradient(WO, lambda g: g.mul_(100.0), ALWAYS),
        ),
        Fault(
            "layer's gradient negated", gradients, "slow", "optimizer", WO,
            prepare=_gradient(WO, torch.Tensor.neg_, ALWAYS),
        ),
        Fault(
            "layer's gradient zero", gradients, "slow", "optimizer", WO,
            prepare=_gradient(WO, torch.Tensor.zero_, ALWAYS),
        ),
        Fault(
            "all gradients negated", gradients, "slow", "optimizer",
            prepare=_gradient("", torch.Tensor.neg_, ALWAYS),
        ),
        Fault("SwiGLU spike", codes, "sudden", "precision", W2, prepare=_swiglu_spike, recipe="tensorwise"),
        Fault(
            "fprop's scale x 1.15", codes, "moderate", "precision", W2,
            prepare=_dequantised(W2, lambda n, y: 1.15 * y),
        ),
        Fault(
            "fprop's scale x 1.02, with a baseline", codes, "slow", "precision", W2,
            prepare=_dequantised(W2, lambda n, y: 1.02 * y), baseline=True,
        ),
        Fault("fprop's scale x 4", codes, "sudden", "precision", W2, prepare=_dequantised(W2, lambda n, y: 4 * y)),
        Fault(
            "fprop's scale grows 1 % per step", codes, "slow", "precision", W2,
            prepare=_dequantised(W2, lambda n, y: y * 1.01 ** (n + 1)), baseline=True,
        ),
        Fault("codes of 8 columns zero", codes, "moderate", "precision", WQ, prepare=_dequantised(WQ, _no_columns)),
        Fault(
            "gradient's scale x 8", codes, "moderate", "precision", W2,
            prepare=_dequantised(W2, lambda n, g: 8 * g, backward=True),
        ),
        Fault("stored scale / 64", codes, "sudden", "precision", W2, _stored_scale(W2, 1 / 64), recipe="delayed"),
        Fault("stored scale x 2^14", codes, "sudden", "precision", W2, _stored_scale(W2, 2.0**14), recipe="delayed"),
        Fault(
            "stored scale / 64, each 10th step", codes, "repeated", "precision", W2,
            _stored_scale(W2, 1 / 64, every=10), recipe="delayed",
        ),
        Fault(
            "stored scale never updated as activations grow", codes, "slow", "precision", W2,
            _stored_scale_stays(W2), recipe="delayed",
        ),
        Fault(
            "codes of an earlier input", codes, "sudden", "precision", WQ,
            prepare=_stale_codes(WQ),
        ),
        Fault(
            "learning rate x 30 for 6 steps", configuration, "sudden", "optimizer",
            strike=_lr(lambda n: 30.0 if n < 6 else 1.0),
        ),
        Fault("learning rate x 20", configuration, "sudden", "optimizer", strike=_lr(lambda n: 20.0)),
        Fault("learning rate x 4", configuration, "moderate", "optimizer", strike=_lr(lambda n: 4.0)),
        Fault(
            "learning rate grows 8 % per step", configuration, "slow", "optimizer",
            strike=_lr(lambda n: 1.08 ** (n + 1)),
        ),
        Fault(
            "weight decay x 1000", configuration, "moderate", "optimizer",
            strike=_group(weight_decay=lambda decay: 1000 * (decay or 0.1)),
        ),
        Fault("beta2 0.5", configuration, "moderate", "optimizer", strike=_group(betas=(0.9, 0.5))),
        Fault("epsilon 1", configuration, "slow", "optimizer", strike=_group(eps=1.0)),
        Fault("optimizer makes no steps", configuration, "slow", "optimizer", strike=_no_steps),
        Fault("clipping at 1e-4", configuration, "slow", "optimizer", strike=_no_clip),
    ]  # fmt: skip


FAULTS = {fault.name: fault for fault in _faults()}
"""By name."""
