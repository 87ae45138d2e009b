"""Host time and kernel launches per block, on Llama blocks so small that the host never waits for the GPU.

A step is forward and backward of 8 blocks. Before each step, outside the timed region, all weights are modified in
place by one foreach operation, so that every implementation quantises them again, as after an optimizer step. Host
time is the wall time of a step until the host has issued everything, without synchronising. Launches are counted by
the profiler in a second pass, after all timing, as the profiler slows later launches.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import skip_own_guards
from octavo._util.collector import no_collection
from octavo.errors import UnsupportedError
from octavo.lab.train.timing import Kernel, busy
from octavo_bench.implementations import BF16, TORCHAO, Implementation, implementations
from octavo_bench.kind import TO_STDOUT, Kind, Output, known, positive
from octavo_bench.results import Row
from octavo_bench.timing import attempt

DIM, FFN, HEADS, HEAD_DIM, BLOCKS, TOKENS = 1024, 4096, 8, 128, 8, 128
MODES = ("eager", "compiled")
SKIPPED = "compiled, own guards skipped"
"""Octavo's blocks alone: compiled with `octavo.skip_own_guards`, as `octavo train` compiles them."""
WARM_UP_STEPS = 10
STEPS = 50
"""Timed steps; the median is reported."""
PROFILED_STEPS = 5
KIND = Kind(
    name="host",
    keys={"implementation": str, "mode": str, "ms_per_block": float, "launches_per_block": float},
    columns=(
        ("implementation", "{implementation}"),
        ("mode", "{mode}"),
        ("host ms per block", "{ms_per_block:.2f}"),
        ("GPU ms per block", "{gpu_ms_per_block:.2f}"),
        ("launches per block", "{launches_per_block:.1f}"),
        ("copies per block", "{copies_per_block:.1f}"),
        ("compiled pieces per block", "{pieces_per_block:.1f}"),
    ),
    names=2,
)


class Block(nn.Module):
    """A pre-norm Llama block without biases: attention and a SwiGLU MLP, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        y_BTD: Tensor = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return y_BTD


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Return the attention output, (B,T,D)."""
        q_BTD, k_BTD, v_BTD = self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)
        q_BHTE, k_BHTE, v_BHTE = (
            y_BTD.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for y_BTD in (q_BTD, k_BTD, v_BTD)
        )
        q_BHTE, k_BHTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BHTE, cos_TE, sin_TE)
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        y_BTD: Tensor = self.wo(y_BHTE.transpose(1, 2).flatten(-2))
        return y_BTD


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN, bias=False)
        self.w2 = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the MLP output, (B,T,D)."""
        y_BTD: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return y_BTD


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head by the angle of their position."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


class Stack:
    """The blocks of one implementation, with their input and the gradient of their output."""

    def __init__(self, implementation: Implementation, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).to(torch.bfloat16)
            frequencies_E = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
            angles_TE = torch.outer(torch.arange(TOKENS), frequencies_E).repeat(1, 2)
            self.x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16).requires_grad_()
            self.gradient = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16)
        self.tables = angles_TE.cos().bfloat16(), angles_TE.sin().bfloat16()
        implementation.convert(self.blocks, TOKENS)
        self.parameters: list[Tensor] = list(self.blocks.parameters())

    def compile(self, options: dict[str, Any] | None = None) -> None:
        """Compile each block separately. Graph breaks are allowed: they are part of the measurement."""
        for block in self.blocks:
            block.compile(options=options)

    def change_weights(self) -> None:
        """Drop the gradients and modify all weights in place, as an optimizer does, with unchanged values."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = None
        with torch.no_grad():
            torch._foreach_mul_(self.parameters, 1.0)

    def step(self) -> None:
        """Run forward and backward."""
        x = self.x
        for block in self.blocks:
            x = block(x, *self.tables)
        x.backward(self.gradient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """GPU work of one step, from the profiler."""

    kernels: int
    copies: int
    """Memory copies and fills."""
    busy_ms: float
    """Time during which at least one of them ran."""
    pieces: int
    """Compiled regions entered; 0 in eager mode."""
    names: dict[str, int]
    """Kernels by name, the most frequent first."""


def bench_host(recipes: Sequence[str] = ("folded",), *, steps: int = STEPS) -> Iterator[Row]:
    """Yield one row per implementation and mode, after timing all.

    Args:
        recipes: Octavo recipes to time besides BF16 and torchao's tensorwise.
        steps: steps to time, 30 or more.

    Raises:
        UnsupportedError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("octavo bench host times host work for a CUDA GPU, and there is none here.")
    found = implementations()
    own = [known("--recipes", f"octavo {recipe}", [*found], "implementation") for recipe in recipes]
    names = [name for name in found if name in (BF16, TORCHAO, *own)]
    timed = {
        (name, mode): attempt({"implementation": name, "mode": mode}, partial(_times, found[name], mode, steps), "cuda")
        for name in names
        for mode in ((*MODES, SKIPPED) if name in own else MODES)
    }
    for (name, mode), row in timed.items():
        yield row if "error" in row else attempt(row, partial(_launch_figures, found[name], mode), "cuda")


def _stack(implementation: Implementation, mode: str) -> Stack:
    stack = Stack(implementation, "cuda")
    if mode != "eager":
        stack.compile({"guard_filter_fn": skip_own_guards} if mode == SKIPPED else None)
    return stack


def _times(implementation: Implementation, mode: str, steps: int) -> Row:
    """Time steps: milliseconds per block until everything is issued, and until it has completed."""
    stack = _stack(implementation, mode)
    _warm_up(stack)
    issued, done = [], []
    with no_collection():
        for _ in range(steps):
            stack.change_weights()
            torch.cuda.synchronize()
            start = time.perf_counter()
            stack.step()
            issued.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            done.append(time.perf_counter() - start)
    low, _, high = statistics.quantiles(issued, n=4)
    per_block = 1e3 / BLOCKS
    return {
        "ms_per_block": round(statistics.median(issued) * per_block, 4),
        "quartiles_ms": [round(low * per_block, 4), round(high * per_block, 4)],
        "done_ms_per_block": round(statistics.median(done) * per_block, 4),
        "steps": steps,
    }


def _launch_figures(implementation: Implementation, mode: str) -> Row:
    """Profile a few steps separately, and return the GPU work of the median one, per block."""
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    stack = _stack(implementation, mode)
    _warm_up(stack)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    seen: list[Launches] = []
    for _ in range(PROFILED_STEPS):
        stack.change_weights()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            stack.step()
            torch.cuda.synchronize()
        seen.append(_launches(profiler.events() or ()))
    launches = sorted(seen, key=lambda entry: entry.kernels)[len(seen) // 2]
    return {
        "launches_per_block": round(launches.kernels / BLOCKS, 2),
        "copies_per_block": round(launches.copies / BLOCKS, 2),
        "gpu_ms_per_block": round(launches.busy_ms / BLOCKS, 4),
        "pieces_per_block": round(launches.pieces / BLOCKS, 2),
        "kernels": launches.names,
    }


def _launches(events: Sequence[Any]) -> Launches:
    gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ran = [e for e in events if e.device_type == gpu and not getattr(e, "is_user_annotation", False)]
    names = Counter(e.name for e in ran)
    copies = sum(count for name, count in names.items() if name.startswith(("Memcpy", "Memset")))
    spans = [Kernel(e.name, e.time_range.start, e.time_range.end) for e in ran]
    return Launches(
        kernels=len(ran) - copies,
        copies=copies,
        busy_ms=busy(spans) / 1e3,
        pieces=sum(e.device_type != gpu and e.name.startswith("Torch-Compiled Region") for e in events),
        names=dict(names.most_common()),
    )


def _warm_up(stack: Stack) -> None:
    for _ in range(WARM_UP_STEPS):
        stack.change_weights()
        stack.step()
    torch.cuda.synchronize()


def command(*, recipes: str = "folded", steps: int = STEPS, output: Output = TO_STDOUT) -> int:
    """Time the host per block and count kernel launches, on Llama blocks too small to keep a GPU busy.

    Forward and backward of 8 blocks (dim 1024, 128 tokens) in BF16, torchao if installed, and Octavo, in eager mode and
    compiled per block. Needs a CUDA device.

    Examples:

        octavo bench host
        octavo bench host --recipes folded,block --write benchmarks/results

    Parameters
    ----------
    recipes
        Octavo's recipes, separated by commas.
    steps
        Timed steps, after a warm-up, 30 or more; the median is reported.
    """
    rows = bench_host(recipes.split(","), steps=positive("--steps", steps))
    return output.finish(KIND, rows, device="cuda", recipes=recipes, steps=steps)
