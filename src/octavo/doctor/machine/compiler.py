"""`torch.compile`, which `octavo train` uses on a GPU: does it work, and does it compute the same?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.doctor.check import Finding, check, failure, ok, skipped
from octavo.doctor.subjects import Machine


@check(
    "compiler",
    symptom="a run stops in its first step with an error of inductor, gcc or ptxas",
    remedy="Install a C compiler (gcc) and Python's headers, or train without: --compile off.",
)
def compiler(machine: Machine) -> Finding:
    """Compile a small function, forward and backward, and compare with what it gives uncompiled."""
    if machine.device.type != "cuda":
        return skipped("runs on a CPU are not compiled unless asked to")
    x = torch.linspace(-4, 4, 4096, device=machine.device).reshape(64, 64)
    plain, compiled = (_result(how, x) for how in (_silu, torch.compile(_silu, fullgraph=True)))
    apart = max(float((one - other).abs().max()) for one, other in zip(plain, compiled, strict=True))
    found = ok if apart <= 1e-5 else failure
    return found(f"compiled code gives the same within {apart:.1e}", apart=apart)


def _silu(x: Tensor) -> Tensor:
    return nn.functional.silu(x) * x.mean(dim=1, keepdim=True)


def _result(how: object, x: Tensor) -> tuple[Tensor, Tensor]:
    assert callable(how)
    leaf = x.clone().requires_grad_()
    y: Tensor = how(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad
