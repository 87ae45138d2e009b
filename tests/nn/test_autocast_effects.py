"""What autocast would change, as functions show: beside what it does change, where this machine can tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.autocast_effects import ignores_autocast

WIDTH = 8


class Scaled(nn.Module):
    """Multiplies by a weight what `compute` returns."""

    def __init__(self, compute) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.rand(WIDTH)), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.compute(x)


def in_fp32(x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def within_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return 2 * x


COMPUTE = {
    "a norm in FP32": (in_fp32, True),
    "a product of elements": (lambda x: x * x - 2 * x, True),
    "a power in 16 bits": (lambda x: x.pow(2), False),
    "a root in 16 bits": (lambda x: torch.rsqrt(x * x + 1), False),
    "a sum in 16 bits": (lambda x: x - x.sum(-1, keepdim=True), False),
    "PyTorch's layer norm": (lambda x: F.layer_norm(x, (WIDTH,)), False),
    "PyTorch's RMS norm": (lambda x: F.rms_norm(x, (WIDTH,)), False),
    "a matrix product": (lambda x: x @ x.t() @ x, False),
    "a matrix product in FP32": (lambda x: (x.float() @ x.float().t() @ x.float()).to(x.dtype), False),
    "autocast of its own": (within_autocast, False),
    "an error": (lambda x: x.reshape(3), False),
}


@pytest.mark.parametrize("what", COMPUTE)
def test_functions_tell_whether_autocast_changes_them(what):
    compute, expected = COMPUTE[what]
    x = torch.randn(4, WIDTH).bfloat16()
    assert ignores_autocast(Scaled(compute).bfloat16(), x) is expected


@pytest.mark.gpu
@pytest.mark.parametrize("what", [what for what, (_, expected) in COMPUTE.items() if expected])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_a_gpu_changes_no_bit_of_what_ignores_it(what, dtype):
    module, x = Scaled(COMPUTE[what][0]).to("cuda", dtype), torch.randn(4, WIDTH, device="cuda", dtype=dtype)
    with torch.autocast("cuda", torch.bfloat16):
        y = module(x)
    assert y.dtype == dtype and torch.equal(y, module(x))
