"""Time the optimizers: each tier against `torch.optim.AdamW(fused=True)`, on weights of a Llama's shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.lab.train.timing import synchronize
from octavo.optim import TIERS, AdamW, Muon, Optimizer, states_named
from octavo.optim.states import RuleName
from octavo.tensor import FP8Tensor
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, positive
from octavo_bench.rates import copy_rate
from octavo_bench.render import has_failed
from octavo_bench.results import Row
from octavo_bench.timing import attempt, median_ms

BASELINE, MUON_BASELINE = "torch fused AdamW", "torch Muon"
CLIP = 1.0
KIND = Kind(
    name="optimizer",
    keys={"states": str, "bytes_per_parameter": float, "ms": float, "ratio_to_fused_adamw": float},
    columns=(
        ("states", "{states}"),
        ("weight", "{weight}"),
        ("gradient", "{gradient}"),
        ("bytes per parameter", "{bytes_per_parameter:.2f}"),
        ("ms", "{ms:.2f}"),
        ("of fused AdamW's time", "{ratio_to_fused_adamw:.2f}"),
        ("ms with clipping", "{ms_clipped:.2f}"),
        ("GB/s", "{gb_per_s:,.0f}"),
        ("of a copy's", "{ratio_to_copy:.2f}"),
        ("update error, dB", "{update_error_db:.1f}"),
    ),
    names=3,
)


class Width(NamedTuple):
    """The widths of a Llama's layer."""

    dim: int
    ffn: int
    kv: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The parameters of a layer: queries, keys, values, output, gate, up, down, two norms."""
        dim, ffn, kv = self
        return [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn), (dim,), (dim,)]


LARGE, SMALL = Width(2048, 8192, 512), Width(256, 512, 64)


class Case(NamedTuple):
    """A line of the table."""

    states: str
    weight: torch.dtype
    gradient: torch.dtype
    rule: RuleName = "adamw"

    @property
    def label(self) -> str:
        """The cell of the column `states`."""
        return self.states if self.rule == "adamw" or self.is_pytorchs else f"{self.states}, Muon"

    @property
    def is_pytorchs(self) -> bool:
        """True for a baseline."""
        return self.states in (BASELINE, MUON_BASELINE)

    @property
    def has_separate_master(self) -> bool:
        """True if a step reads a separate master and not the weight."""
        if self.is_pytorchs:
            return False
        return TIERS[self.states].layout(self.rule, self.weight, self.gradient, stochastic=True).master is not None

    @property
    def backward(self) -> torch.dtype:
        """Dtype of gradients from backward."""
        return _HALF if self.gradient == _FP8 else self.gradient


_HALF, _FP8 = torch.bfloat16, torch.float8_e4m3fn
CASES = (
    Case(BASELINE, torch.float32, torch.float32),
    Case(BASELINE, _HALF, _HALF),
    Case("fp32", torch.float32, torch.float32),
    Case("fp8", torch.float32, torch.float32),
    *(Case(name, _HALF, _HALF) for name in TIERS),
    *(Case(name, _FP8, gradient) for gradient in (_HALF, _FP8) for name in ("fp8-lm", "fp8", "fp8-min")),
    Case(MUON_BASELINE, _HALF, _HALF, "muon"),
    *(Case(name, _HALF, _HALF, "muon") for name in ("fp32", "fp8")),
)
"""The first is the baseline: FP32 weights, gradients and moments."""


def bench_optimizer(
    *,
    parameters: int = 10**9,
    device: str = "cuda",
    repeats: int = 20,
    states: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield one row per tier and dtype of the weight.

    `ms`: a step without clipping or overflow check, as PyTorch's has neither; `ms_clipped`: a step with clipping to a
    global norm, PyTorch's by `clip_grad_norm_`. `seconds`: time of the row; `seconds_to_first_step`: time to the end of
    its first step, compilation included. `update_error_db`: AdamW only.

    Args:
        parameters: approximate number of parameters.
        states: tiers to time besides the baseline; all if empty.
    """
    baseline: Row | None = None
    width, copy = LARGE if device == "cuda" else SMALL, copy_rate(device)
    for case in CASES:
        if states and case.states not in (BASELINE, *states):
            continue
        start = time.perf_counter()
        about: Row = {"states": case.label, "weight": _dtype_name(case.weight), "gradient": _dtype_name(case.gradient)}
        row = attempt(about, partial(_measure, case, width, parameters, device, repeats, copy))
        baseline = baseline or row
        if "ms" in row and "ms" in baseline:
            row["ratio_to_fused_adamw"] = round(row["ms"] / baseline["ms"], 3)
        elif "ms" in row:
            row["error"] = f"{BASELINE} failed; {row['ms']:.3f} ms without a ratio"
        row["seconds"] = round(time.perf_counter() - start, 1)
        yield row
        if device == "cuda":
            torch.cuda.empty_cache()


def _measure(case: Case, width: Width, count: int, device: str, repeats: int, copy: float) -> Row:
    start = time.perf_counter()
    weights = _weights(case, width, count, device)
    count = sum(weight.numel() for weight in weights)
    if case.is_pytorchs:
        plain, clipped, taken = _torch(weights, case)
    else:
        plain, clipped, taken = _ours(weights, case)
    synchronize(device)
    first = round(time.perf_counter() - start, 1)
    ms = _time(plain, device, repeats)
    # All tensors are read and written, but gradients are only read, and weights with a separate master only written.
    once = taken["gradient"] + (taken["weight"] if case.has_separate_master else 0.0)
    moved = (2 * taken["total"] - once) * count
    error = {"update_error_db": _update_error(case, device)} if case.rule == "adamw" else {}
    return {
        **error,
        "parameters": count,
        "bytes_per_parameter": round(taken["total"], 4),
        "ms": ms,
        "ms_clipped": _time(clipped, device, repeats),
        "gb_per_s": round(moved / ms / 1e6, 1),
        "ratio_to_copy": round(moved / ms / 1e6 / copy, 3),
        "seconds_to_first_step": first,
    }


Prepared = tuple[Callable[[], Any], Callable[[], Any], dict[str, float]]
"""A step, a step that clips, and the bytes per parameter by kind."""


def _torch(weights: Sequence[Tensor], case: Case) -> Prepared:
    others = weights if case.rule == "adamw" else [weight for weight in weights if weight.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=1e-4, fused=True)]
    if case.rule == "muon":
        optimizers.append(torch.optim.Muon([weight for weight in weights if weight.dim() == 2], lr=1e-4))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def clipped() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP)
        step()

    step()
    held = [weight.nbytes for weight in weights] + [weight.grad.nbytes for weight in weights if weight.grad is not None]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    held += [tensor.nbytes for state in states for tensor in state.values() if tensor.dim()]
    total = sum(held) / sum(weight.numel() for weight in weights)
    return step, clipped, {"total": total, "gradient": case.gradient.itemsize}


def _ours(weights: Sequence[Tensor], case: Case) -> Prepared:
    settings: dict[str, Any] = {"states": case.states, "gradients": "fp8" if case.gradient == _FP8 else "wide"}
    named = [(f"weight{number}", weight) for number, weight in enumerate(weights)]
    kind: Callable[..., Optimizer] = AdamW if case.rule == "adamw" else Muon
    optimizer = kind(named, lr=1e-4, skip_nonfinite=False, **settings)

    def clipped() -> None:
        optimizer.clip = CLIP
        optimizer.step()
        optimizer.clip = None

    optimizer.step()
    return optimizer.step, clipped, optimizer.report()


def _update_error(case: Case, device: str) -> float:
    settings: dict[str, Any] = {
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
    }

    def make(weight: nn.Parameter) -> torch.optim.Optimizer:
        if case.is_pytorchs:
            return torch.optim.AdamW([weight], fused=True, **settings)
        gradients: Any = "fp8" if case.gradient == _FP8 else "wide"
        return AdamW([weight], states=case.states, gradients=gradients, **settings)

    return update_error_db(_weight(_start_weight(device), case), make, case.backward)


def _time(call: Callable[[], Any], device: str, repeats: int) -> float:
    return round(median_ms(call, device, repeats, calls=1), 4)


def _weights(case: Case, width: Width, count: int, device: str) -> list[nn.Parameter]:
    """Return weights with gradients, of as many layers as give about `count` parameters."""
    generator = torch.Generator(device).manual_seed(0)
    found: list[nn.Parameter] = []
    while sum(weight.numel() for weight in found) < count - sum(map(_size, width.shapes)) // 2 or not found:
        for shape in width.shapes:
            value = 0.02 * torch.randn(shape, generator=generator, device=device)
            gradient = 1e-3 * torch.randn(shape, generator=generator, device=device)
            found.append(_weight(value, case))
            found[-1].grad = gradient.to(case.backward)
    return found


def _weight(value: Tensor, case: Case) -> nn.Parameter:
    if case.weight != torch.float8_e4m3fn:
        return nn.Parameter(value.to(case.weight))
    half = value.to(case.backward)
    return nn.Parameter(FP8Tensor.from_tensor(half) if value.dim() == 2 else half)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SHAPE, STEPS = (64, 256), 50
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_NOISE, _SPREAD = 4.0, 1.0
"""Noise-to-signal ratio, and standard deviation of the log sizes of rows and columns."""


def _start_weight(device: str) -> Tensor:
    """Return the initial weights, FP32."""
    return 0.02 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)


def update_error_db(
    weight: nn.Parameter, make: Callable[[nn.Parameter], torch.optim.Optimizer], gradient: torch.dtype
) -> float:
    """Return |w - w64| / |w64 - w0| in dB: the error of all updates together, relative to them.

    A small problem with known gradients, the same for every storage: a constant signal and four times as much noise,
    with log-normal sizes of rows and columns. FP64 gets them exactly, an optimizer in its gradient dtype.

    w is the master if the optimizer has one, w64 the weight after the same number of steps of AdamW in FP64.

    Args:
        weight: `_start_weight` in any dtype.
        make: (parameter) -> its optimizer, with `LR`, `BETAS`, `EPS` and `WEIGHT_DECAY`.
        gradient: dtype of gradients from backward.
    """
    before = _value(weight)
    exact = before.clone()
    first, second = torch.zeros_like(exact), torch.zeros_like(exact)
    optimizer = make(weight)
    for step, g in enumerate(_gradients(weight.device), start=1):
        weight.grad = g.to(gradient)
        optimizer.step()
        optimizer.zero_grad()
        g = g.double()
        first += (g - first) * (1 - BETAS[0])
        second += (g.square() - second) * (1 - BETAS[1])
        root = (second / (1 - BETAS[1] ** step)).sqrt()
        exact = exact * (1 - LR * WEIGHT_DECAY) - LR * first / (1 - BETAS[0] ** step) / (root + EPS)
    after = optimizer.master_weights()[0].double() if isinstance(optimizer, Optimizer) else _value(weight)
    error = float((after - exact).norm() / (exact - before).norm())
    return round(20 * math.log10(error), 2)


def _gradients(device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, cols = (torch.randn(n, generator=generator).mul(_SPREAD).exp() for n in SHAPE)
    size = 1e-4 * rows[:, None] * cols
    signal = torch.randn(SHAPE, generator=generator)
    for _ in range(STEPS):
        yield (size * (signal + _NOISE * torch.randn(SHAPE, generator=generator))).to(device)


def _value(weight: nn.Parameter) -> Tensor:
    value = weight.dequantize(torch.float32) if isinstance(weight, FP8Tensor) else weight
    return value.detach().double()


def command(
    *,
    states: Names = (),
    parameters: float | None = None,
    device: str = "auto",
    repeats: int = 20,
    output: Output = TO_STDOUT,
) -> int:
    """Time the optimizer of every tier of states against PyTorch's fused AdamW.

    Examples:

        octavo bench optimizer
        octavo bench optimizer --states fp8 --states exact --parameters 3e8
        octavo bench optimizer --device cpu --repeats 3

    Parameters
    ----------
    states
        Tiers to time; all by default.
    parameters
        Approximate number of parameters; by default 1e9 on a GPU and 1e6 on a CPU.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Timed steps, after a warm-up; the median is reported.
    """
    for name in states:
        states_named(name)
    device, repeats = device_named(device), positive("--repeats", repeats)
    count = positive("--parameters", int(parameters or (1e9 if device == "cuda" else 1e6)))
    bench = bench_optimizer(parameters=count, device=device, repeats=repeats, states=states)
    rows = output.keep(KIND, bench, device=device, states=states, parameters=count, repeats=repeats)
    spent, before = (sum(row.get(key, 0.0) for row in rows) for key in ("seconds", "seconds_to_first_step"))
    output.say(f"{spent:.0f} s, {before:.0f} s of them up to the end of the first steps: weights, states, compilation")
    return int(any(has_failed(row) for row in rows))
