"""`torch.compile`, which `octavo train` uses on a GPU: does it work, and does it compute the same?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Machine, a_gpu

TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""Of the largest value, 2^-17. Of numbers of one sign, of which nothing cancels, a sum of 64 in another order is off by
at most 32 epsilon, and a fused multiply-add, an approximate exp or a division by a few. A number that was held in FP16
or TF32 on the way is off by up to 2^-11, 64 times as much; one that was left out, or taken twice, by far more."""
TERMS = 64
"""Of a sum."""

Outputs = tuple[Tensor, Tensor]
Function = Callable[[Tensor], Tensor]


@check(
    "compiler",
    symptom="a run stops in its first step with an error of inductor, gcc or ptxas",
    remedy="Install a C compiler (gcc) and Python's headers, or train without: --compile off.",
    needs=a_gpu,
)
def compiler(machine: Machine) -> Finding:
    """Compile a small function, forward and backward, and compare with what it gives uncompiled."""
    x = inputs(machine.device)
    return judge(outputs(scaled_silu, x), outputs(torch.compile(scaled_silu, fullgraph=True), x))


def judge(plain: Outputs, compiled: Outputs) -> Finding:
    """Return the finding for what the function gives uncompiled and compiled."""
    forward, backward = (_apart(*both) for both in zip(plain, compiled, strict=True))
    found = ok if forward <= TOLERANCE and backward <= TOLERANCE else failure  # so is NaN, which is below nothing
    seen = f"compiled code differs by {forward:.1e} of the largest value, its gradients by {backward:.1e}"
    return found(seen, forward=forward, backward=backward, limit=TOLERANCE)


def inputs(device: torch.device) -> Tensor:
    """Return FP32 (64, TERMS), from 1 to 4."""
    return torch.linspace(1, 4, 64 * TERMS, device=device).reshape(64, TERMS)


def outputs(function: Function, x: Tensor) -> Outputs:
    """Return y = function(x) and the gradient of the sum of its squares, both of the shape of x."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def scaled_silu(x: Tensor) -> Tensor:
    """Return silu(x), each row times its mean: elements and sums, to be fused."""
    return nn.functional.silu(x) * x.mean(dim=1, keepdim=True)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())
