"""Rounding otherwise is no fault; losing precision, or an element, is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.doctor.check import make
from octavo.doctor.machine.compiler import compiler, inputs, judge, outputs, scaled_silu
from octavo.doctor.subjects import Machine

CPU = torch.device("cpu")


def held_in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function as a compiler makes it that holds an activation in another dtype."""

    def function(x: Tensor) -> Tensor:
        return (x * torch.sigmoid(x)).to(dtype).to(x.dtype) * x.mean(dim=1, keepdim=True)

    return function


def summed_backwards(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 1)
    for column in x.flip(1).split(1, dim=1):
        total = total + column
    return x / (1 + torch.exp2(x * -1.44269504)) * total * (1 / x.shape[1])


def without_the_last_term(x: Tensor) -> Tensor:
    return scaled_silu(x) - torch.nn.functional.silu(x) * x[:, -1:] / x.shape[1]


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (summed_backwards, "ok"),
        (held_in(torch.float64), "ok"),
        (held_in(torch.float16), "failure"),
        (held_in(torch.bfloat16), "failure"),
        (without_the_last_term, "failure"),
    ],
)
def test_only_what_rounds_otherwise_is_the_same(function: Callable[[Tensor], Tensor], verdict: str) -> None:
    finding = judge(outputs(scaled_silu, inputs(CPU)), outputs(function, inputs(CPU)))
    assert finding.verdict == verdict, finding


def test_rounded_once_it_is_the_same() -> None:
    """Against FP64, which is rounded to FP32 at its end alone."""
    exact = outputs(scaled_silu, inputs(CPU).double())
    finding = judge(outputs(scaled_silu, inputs(CPU)), (exact[0].float(), exact[1].float()))
    assert finding.verdict == "ok", finding


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrong", [float("nan"), 0.0])
def test_one_wrong_element_is_found(which: int, wrong: float) -> None:
    plain = outputs(scaled_silu, inputs(CPU))
    compiled = tuple(part.clone() for part in plain)
    compiled[which][0, 0] = wrong  # where values are smallest
    finding = judge(plain, (compiled[0], compiled[1]))
    assert finding.verdict == "failure", finding


@pytest.mark.gpu
def test_a_gpu_compiles() -> None:
    finding = make(compiler, Machine(torch.device("cuda", 0))).finding
    assert finding.verdict == "ok", finding
