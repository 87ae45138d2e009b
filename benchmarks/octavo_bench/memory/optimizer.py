"""Time the optimizers: each tier beside `torch.optim.AdamW(fused=True)`, on weights of a Llama's shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.optim import TIERS, AdamW, Muon, Optimizer
from octavo.optim.states import RuleName
from octavo.tensor import FP8Tensor
from octavo.train.timing import milliseconds, synchronize, warm_up
from octavo_bench.memory import update_error
from octavo_bench.rates import copy_rate
from octavo_bench.results import failure

Row = dict[str, Any]

BASELINE, MUON_BASELINE = "torch fused AdamW", "torch Muon"
CLIP = 1.0


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
        """What the column `states` says."""
        return self.states if self.rule == "adamw" or self.is_pytorchs else f"{self.states}, Muon"

    @property
    def is_pytorchs(self) -> bool:
        """Whether it is to compare with."""
        return self.states in (BASELINE, MUON_BASELINE)

    @property
    def has_master_apart(self) -> bool:
        """Whether a step reads a master and no weight."""
        if self.is_pytorchs:
            return False
        return TIERS[self.states].layout(self.rule, self.weight, self.gradient, stochastic=True).master is not None

    @property
    def backward(self) -> torch.dtype:
        """What backward makes gradients in."""
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
"""The first is what all are compared with: FP32 weights, gradients and moments."""


def bench_optimizer(
    *,
    parameters: int = 10**9,
    device: str = "cuda",
    repeats: int = 20,
    states: Sequence[str] = (),
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return one row a tier and dtype of the weight, as the result kind `optimizer` has them.

    `ms` is a step without clipping or a search for overflows, as PyTorch's has neither; `ms_clipped` is one with
    clipping to a global norm, PyTorch's by `clip_grad_norm_`. `seconds` is what the row took; until its first step was
    done, kernels compiled, `seconds_to_first_step`. `update_error_db` is of `update_error`, for AdamW.

    Args:
        parameters: about how many.
        states: tiers to time beside the baseline; all where empty.
        report: called with each row as it comes.
    """
    rows: list[Row] = []
    width = LARGE if device == "cuda" else SMALL
    copy = copy_rate(device)
    for case in CASES:
        if states and case.states not in (BASELINE, *states):
            continue
        start = time.perf_counter()
        row: Row = {"states": case.label, "weight": _name(case.weight), "gradient": _name(case.gradient)}
        try:
            row |= _measure(case, width, parameters, device, repeats, copy)
            row["ratio_to_fused_adamw"] = round(row["ms"] / (rows[0]["ms"] if rows else row["ms"]), 3)
        except Exception as error:  # one that fails must not lose the others
            row["error"] = failure(error)
        row["seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        report(row)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


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
    # All is read and written; but gradients are only read, and a weight with a master apart is only written.
    once = taken["gradient"] + (taken["weight"] if case.has_master_apart else 0.0)
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
"""A step, a step that clips, and the bytes a parameter by kind."""


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
        "lr": update_error.LR,
        "betas": update_error.BETAS,
        "eps": update_error.EPS,
        "weight_decay": update_error.WEIGHT_DECAY,
    }

    def make(weight: nn.Parameter) -> torch.optim.Optimizer:
        if case.is_pytorchs:
            return torch.optim.AdamW([weight], fused=True, **settings)
        gradients: Any = "fp8" if case.gradient == _FP8 else "wide"
        return AdamW([weight], states=case.states, gradients=gradients, **settings)

    return update_error.update_error_db(_weight(update_error.start(device), case), make, case.backward)


def _time(call: Callable[[], Any], device: str, repeats: int) -> float:
    warm_up(call, device, calls=1, seconds=0.05)
    return round(statistics.median(milliseconds(call, device, repeats, queued=True)), 4)


def _weights(case: Case, width: Width, count: int, device: str) -> list[nn.Parameter]:
    """Return weights with gradients: layers until there are as many parameters as that."""
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
