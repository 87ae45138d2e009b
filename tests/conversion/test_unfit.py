"""Layers whose parent reads their weight and never calls them."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo

WHY = "{} reads its weight and never calls it"


class Reads(nn.Module):
    """torchvision's Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.linear(x, self.qkv.weight, self.qkv.bias))


class ReadsElsewhere(Reads):
    """WavLM: in another method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.project(x))

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, weight=self.qkv.weight)


class Decides(Reads):
    """BEiT of timm: an attribute decides which."""

    def __init__(self, bias: Tensor | None, apart: bool = False) -> None:
        super().__init__()
        self.bias, self.apart = bias, apart

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            y = self.qkv(x)
        elif self.apart:
            y = self.qkv(x) + self.bias
        else:
            y = F.linear(x, self.qkv.weight, self.bias)
        return self.proj(y)


class MayCall(Reads):
    """Mamba: a kernel reads the weight, where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.qkv.weight) if x.is_cuda else self.qkv(x)
        return self.proj(y)


class PassesOn(Reads):
    """Whoever gets the layer may call it."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.qkv.weight.dtype
        return self.proj(torch.utils.checkpoint.checkpoint(self.qkv, x.to(dtype), use_reentrant=False))


BIAS = nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize(
    ("module", "reads"),
    [
        (Reads(), True), (ReadsElsewhere(), True), (Decides(BIAS), True), (Decides(None), False),
        (Decides(BIAS, True), False), (MayCall(), False), (PassesOn(), False),
    ],
    ids=["reads", "elsewhere", "decided", "called", "called too", "may call", "passed on"],
)  # fmt: skip
def test_which_layers_are_called(module, reads):
    for policy in (octavo.Policy(), octavo.Policy(weights="fp8")):
        rows = {row.name: row for row in octavo.plan(nn.Sequential(module), "folded", policy=policy).layers}
        assert rows["0.proj"].is_fp8 and rows["0.qkv"].is_fp8 is not reads
        assert rows["0.qkv"].reason == (WHY.format(type(module).__name__) if reads else "")
    octavo.convert(nn.Sequential(module), policy=octavo.Policy(weights="fp8"))
    assert module(torch.randn(4, 64)).shape == (4, 64)
    octavo.revert(module)


class Moved(Reads):
    """A model of diffusers, which warns of attributes that are its config's."""

    @property
    def bias(self) -> None:
        warnings.warn("read it of the config", FutureWarning, stacklevel=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.qkv(x) if self.bias is None else F.linear(x, self.qkv.weight, self.bias))


def test_a_warning_about_an_attribute_that_a_plan_reads_is_not_the_users():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = octavo.plan(Moved())
    assert plan.fp8_layers == 2
