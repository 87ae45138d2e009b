"""Time the optimizers: each tier beside `torch.optim.AdamW(fused=True)`, on weights of a Llama's shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.bench.rates import copy_rate
from octavo.bench.results import failure
from octavo.bench.timing import milliseconds, warm_up
from octavo.optim import TIERS, AdamW
from octavo.tensor import FP8Tensor

Row = dict[str, Any]

BASELINE = "torch fused AdamW"
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


_HALF = torch.bfloat16
CASES = (
    Case(BASELINE, torch.float32, torch.float32),
    Case(BASELINE, _HALF, _HALF),
    Case("fp32", torch.float32, torch.float32),
    Case("fp8", torch.float32, torch.float32),
    *(Case(name, _HALF, _HALF) for name in TIERS),
    *(Case(name, torch.float8_e4m3fn, _HALF) for name in ("fp8-lm", "fp8", "fp8-min")),
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
    clipping to a global norm, PyTorch's by `clip_grad_norm_`.

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
        row: Row = {"states": case.states, "weight": _name(case.weight), "gradient": _name(case.gradient)}
        try:
            row |= _measure(case, width, parameters, device, repeats, copy)
            row["ratio_to_fused_adamw"] = round(row["ms"] / (rows[0]["ms"] if rows else row["ms"]), 3)
        except Exception as error:  # one that fails must not lose the others
            row["error"] = failure(error)
        rows.append(row)
        report(row)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure(case: Case, width: Width, count: int, device: str, repeats: int, copy: float) -> Row:
    weights = _weights(case, width, count, device)
    count = sum(weight.numel() for weight in weights)
    if case.states == BASELINE:
        plain, clipped, taken = _torch(weights, case)
    else:
        plain, clipped, taken = _ours(weights, case)
    ms = _time(plain, device, repeats)
    moved = (2 * taken["total"] - taken["gradient"]) * count  # all is read and written, gradients are only read
    return {
        "parameters": count,
        "bytes_per_parameter": round(taken["total"], 4),
        "ms": ms,
        "ms_clipped": _time(clipped, device, repeats),
        "gb_per_s": round(moved / ms / 1e6, 1),
        "ratio_to_copy": round(moved / ms / 1e6 / copy, 3),
    }


Prepared = tuple[Callable[[], Any], Callable[[], Any], dict[str, float]]
"""A step, a step that clips, and the bytes a parameter by kind."""


def _torch(weights: Sequence[Tensor], case: Case) -> Prepared:
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)

    def clipped() -> None:
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()

    optimizer.step()
    held = [weight.nbytes for weight in weights] + [weight.grad.nbytes for weight in weights if weight.grad is not None]
    held += [tensor.nbytes for weight in weights for tensor in optimizer.state[weight].values() if tensor.dim()]
    total = sum(held) / sum(weight.numel() for weight in weights)
    return optimizer.step, clipped, {"total": total, "gradient": case.gradient.itemsize}


def _ours(weights: Sequence[Tensor], case: Case) -> Prepared:
    optimizer = AdamW(weights, lr=1e-4, states=case.states, skip_nonfinite=False)

    def clipped() -> None:
        optimizer.clip = CLIP
        optimizer.step()
        optimizer.clip = None

    optimizer.step()
    return optimizer.step, clipped, optimizer.report()


def _time(call: Callable[[], Any], device: str, repeats: int) -> float:
    warm_up(call, device, seconds=0.05)
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
            found[-1].grad = gradient.to(case.gradient)
    return found


def _weight(value: Tensor, case: Case) -> nn.Parameter:
    if case.weight != torch.float8_e4m3fn:
        return nn.Parameter(value.to(case.weight))
    half = value.to(case.gradient)
    return nn.Parameter(FP8Tensor.from_tensor(half) if value.dim() == 2 else half)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
