"""The path of a tensor is short in eager mode, and visible to a compiler."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.kernels.runtime import tape
from octavo.nn import Linear
from octavo.nn.telemetry import Telemetry

PACKAGE = str(Path(octavo.__file__).parent)
FRAMES, FILES = 11, 5
"""The most Python frames, and files of Octavo, between `Linear.forward` and the vendor's GEMM."""
CALLS, MODULES = 45, 9
"""The most calls of Octavo's functions, and files, for an eager forward of a layer, without the reference kernels."""
REPLAYED = 20
"""The most calls of Octavo's functions for a forward that is replayed."""
GUARDS = 1.6
"""The most guards of a compiled block, beside those of the same block in BF16."""
LAUNCHES = 95
"""The most kernels of a compiled block, forward and backward. BF16 has 38 to 50, torchao's tensorwise 96."""


def stack_at_the_gemm(layer: Linear, x: Tensor) -> list[FrameType]:
    """Return the frames that are open when `torch._scaled_mm` is called, `Linear.forward` first."""
    found: list[FrameType] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") == "_scaled_mm" and not found:
            at: FrameType | None = frame
            while at is not None and at.f_code is not Linear.forward.__code__:
                found.insert(0, at)
                at = at.f_back
            assert at is not None
            found.insert(0, at)

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.skipif(cpu_unsupported_reason() is not None, reason="this PyTorch has no FP8 GEMM for the CPU")
@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "rowwise"])
def test_few_frames_lie_between_a_layer_and_the_vendors_gemm(recipe):
    layer, x = Linear(64, 32, recipe=recipe), torch.randn(8, 64, requires_grad=True)
    frames = stack_at_the_gemm(layer, x)
    files = {frame.f_code.co_filename for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)}
    assert 0 < len(frames) <= FRAMES, [frame.f_code.co_qualname for frame in frames]
    assert 0 < len(files) <= FILES, files


class Block(nn.Module):
    """A pre-norm Llama block."""

    def __init__(self, dim: int = 256, ffn: int = 512, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = MLP(dim, ffn)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = self.wq(n), self.wk(n), self.wv(n)
        heads = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ffn_norm(x))


class MLP(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(dim, ffn, False),
            nn.Linear(dim, ffn, False),
            nn.Linear(ffn, dim, False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def calls_of(layer: Linear, x: Tensor) -> list[str]:
    """Return the file of each call of Octavo's functions in a forward, those of the reference kernels left out."""
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not is_reference(frame):
            files.append(name.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return files


def is_reference(frame: FrameType) -> bool:
    """Return whether a call is one of a reference kernel, in whose place a GPU launches another."""
    at: FrameType | None = frame
    while at is not None and at.f_code is not Linear.forward.__code__:
        if "numerics" in at.f_code.co_filename or at.f_code.co_filename.endswith("reference.py"):
            return True
        at = at.f_back
    return False


@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "rowwise", "rotated"])
def test_a_forward_is_few_calls(recipe):
    layer, x = Linear(64, 32, recipe=recipe), torch.randn(8, 64, requires_grad=True)
    layer(x)
    files = calls_of(layer, x)
    assert 0 < len(files) <= CALLS, files
    assert len(set(files)) <= MODULES, set(files)


@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "rowwise", "rotated"])
def test_a_replay_is_few_calls(recipe, monkeypatch):
    """From the third call of a signature on, as on a GPU."""
    monkeypatch.setattr(tape, "_is_launched_here", lambda x: True)
    monkeypatch.setattr(tape, "_recordings", OrderedDict())
    layer, x = Linear(64, 32, recipe=recipe), torch.randn(8, 64, requires_grad=True)
    for _ in range(3):
        layer(x)
    files = calls_of(layer, x)
    assert 0 < len(files) <= REPLAYED, files


def guards_of(block: nn.Module) -> int:
    """Return the number of guards of a compiled block."""
    seen: list[int] = []

    def count(guards: Sequence[Any]) -> list[bool]:
        seen.append(len(guards))
        return [True] * len(guards)

    torch.compile(block, backend="eager", fullgraph=True, options={"guard_filter_fn": count})(torch.randn(2, 8, 64))
    torch._dynamo.reset()
    return seen[-1]


def test_a_compiled_block_has_few_guards():
    block = Block(64, 128)
    plain = guards_of(block)
    octavo.convert(block, "folded", policy=octavo.Policy(min_gain=0.0), tokens=16)
    own = guards_of(block)
    octavo.convert(block, "rotated", policy=octavo.Policy(min_gain=0.0), tokens=16)
    assert own == guards_of(block) <= GUARDS * plain
    with Telemetry(block):
        assert guards_of(block) <= own + 10


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "rowwise", "block"])
def test_a_compiled_block_is_one_piece(recipe):
    torch.compiler.reset()
    block = Block().to("cuda", torch.bfloat16)
    octavo.convert(block, recipe, policy=octavo.Policy(min_gain=0.0), tokens=64)
    x = torch.randn(2, 32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    explained = torch._dynamo.explain(block)(x)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


@pytest.mark.gpu
def test_a_compiled_block_has_few_launches():
    torch.compiler.reset()
    block = Block(1024, 4096, 8).to("cuda", torch.bfloat16)
    octavo.convert(block, "folded", policy=octavo.Policy(min_gain=0.0), tokens=128)
    block.compile()
    x = torch.randn(1, 128, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        block(x).sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        block(x).sum().backward()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= LAUNCHES, sorted(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", [512, 300])
@pytest.mark.parametrize("recipe", ["folded", "folded_fast", "tensorwise", "rowwise", "block"])
def test_compiled_code_computes_what_eager_code_does(recipe, features, dtype):
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = Linear(256, features, bias=False, device="cuda", dtype=dtype, recipe=recipe)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16).requires_grad_()
        layer.weight.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            y = run(x)
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))
        results.append((y.detach(), x.grad, layer.weight.grad.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_write_that_no_counter_sees_is_seen_by_compiled_code():
    torch.compiler.reset()
    layer = Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    run, x = torch.compile(layer, fullgraph=True), torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    before = run(x)
    layer.weight.data.mul_(3.0)
    assert torch.equal(run(x), layer(x)) and not torch.equal(run(x), before)


@pytest.mark.gpu
def test_an_open_ledger_counts_what_compiled_code_runs():
    torch.compiler.reset()
    layer = Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(layer, fullgraph=True)
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run(x).sum().backward()
    for steps in (1, 2):
        with octavo.kernels.record() as ledger:
            for _ in range(steps):
                run(x).sum().backward()
        assert ledger.gemms.total() == 3 * steps and ledger.weights == steps and not ledger.fallbacks, ledger
