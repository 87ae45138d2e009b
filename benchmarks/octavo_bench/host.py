"""Host time and kernel launches per block, on Llama blocks so small that the GPU never holds the host up.

Stands alone: `python host.py --json OUT` needs PyTorch, Octavo and a CUDA GPU, and times torchao too if it is there.

A step is forward and backward of 8 blocks. Before each step, outside the timed region, all weights are modified in
place by one foreach operation, so that every implementation quantises them again, as after an optimizer step. Host
time is the wall time of a step until the host has issued everything, without a synchronise inside. Launches are
counted by the profiler in a second pass, after all timing, as the profiler slows later launches down.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Row = dict[str, Any]
Convert = Callable[[nn.Module], object]

DIM, FFN, HEADS, HEAD_DIM, BLOCKS, TOKENS = 1024, 4096, 8, 128, 8, 128
MODES = ("eager", "compiled")
WARM_UP_STEPS = 10
STEPS = 50
"""Timed steps; the median counts."""
PROFILED_STEPS = 5


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
    """Causal self-attention with rotary positions."""

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

    def __init__(self, convert: Convert, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS)).to(torch.bfloat16)
            frequencies_E = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
            angles_TE = torch.outer(torch.arange(TOKENS), frequencies_E).repeat(1, 2)
            self.x = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16).requires_grad_()
            self.gradient = torch.randn(1, TOKENS, DIM, dtype=torch.bfloat16)
        self.tables = angles_TE.cos().bfloat16(), angles_TE.sin().bfloat16()
        convert(self.blocks)
        self.parameters: list[Tensor] = list(self.blocks.parameters())

    def compile(self) -> None:
        """Compile each block by itself. Graph breaks are allowed: they are part of the measurement."""
        for block in self.blocks:
            block.compile()

    def change_weights(self) -> None:
        """Drop the gradients, and modify all weights in place, as an optimizer does; their values stay."""
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


def bench_host(
    recipes: Sequence[str] = ("folded",),
    *,
    steps: int = STEPS,
    report: Callable[[Row], None] = lambda row: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Return one row per implementation and mode, as the result kind `host` has them.

    Args:
        recipes: Octavo recipes to time beside BF16 and torchao's tensorwise.
        steps: steps to time, 30 or more.
        report: called with each row when it is complete.
        note: called with a line on each implementation that is left out.

    Raises:
        UnsupportedError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        from octavo.errors import UnsupportedError

        raise UnsupportedError("octavo bench host times the work of the host for a CUDA GPU, and there is none here.")
    found = implementations(recipes, note)
    rows: list[Row] = []
    for name, convert in found.items():
        rows += _attempts(name, convert, lambda stack: host_times(stack, steps))
    for name, convert in found.items():
        for counted in _attempts(name, convert, lambda stack: launch_figures(count_launches(stack))):
            row = next(r for r in rows if (r["implementation"], r["mode"]) == (name, counted["mode"]))
            row |= counted
            report(row)
    return rows


def implementations(recipes: Sequence[str], note: Callable[[str], None]) -> dict[str, Convert]:
    """Return the conversion of each implementation by name, the baseline first."""
    found: dict[str, Convert] = {"bf16": lambda blocks: None}
    if importlib.util.find_spec("torchao") is not None:
        found["torchao tensorwise"] = _convert_torchao
    else:
        note("torchao is not installed: its rows are left out.")
    return found | {f"octavo {recipe}": _octavo(recipe) for recipe in recipes}


def _convert_torchao(blocks: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=Float8LinearConfig.from_recipe_name("tensorwise"))


def _octavo(recipe: str) -> Convert:
    def convert(blocks: nn.Module) -> None:
        import octavo

        octavo.convert(blocks, recipe, policy=octavo.Policy(min_gain=0.0), tokens=TOKENS, strict=True)

    return convert


def _attempts(name: str, convert: Convert, measure: Callable[[Stack], Row]) -> Iterator[Row]:
    """Yield a row per mode; where one fails, a row that says how, and the others go on."""
    for mode in MODES:
        row: Row = {"implementation": name, "mode": mode}
        try:
            stack = Stack(convert, "cuda")
            if mode == "compiled":
                stack.compile()
            yield row | measure(stack)
        except Exception as error:
            yield row | {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        finally:
            stack = None  # type: ignore[assignment]
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


def host_times(stack: Stack, steps: int) -> Row:
    """Time steps: the milliseconds until all is issued, and until all is done, per block."""
    _warm_up(stack)
    issued, done = [], []
    with _no_collection():
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


def count_launches(stack: Stack) -> Launches:
    """Profile a few steps, each by itself, and return the GPU work of one."""
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
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
    return sorted(seen, key=lambda entry: entry.kernels)[len(seen) // 2]


def launch_figures(launches: Launches) -> Row:
    """Return the figures of a row from the launches of a step, per block."""
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
    busy, reached = 0.0, float("-inf")
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in ran):
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return Launches(
        kernels=len(ran) - copies,
        copies=copies,
        busy_ms=busy / 1e3,
        pieces=sum(e.device_type != gpu and e.name.startswith("Torch-Compiled Region") for e in events),
        names=dict(names.most_common()),
    )


def _warm_up(stack: Stack) -> None:
    for _ in range(WARM_UP_STEPS):
        stack.change_weights()
        stack.step()
    torch.cuda.synchronize()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of timed steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def line(row: Row) -> str:
    """Return one line of progress for a row."""
    named = f"{row['implementation']:24} {row['mode']:9}"
    if "error" in row:
        return f"{named} failed: {row['error']}"
    return (
        f"{named} host {row['ms_per_block']:7.3f} ms, GPU {row['gpu_ms_per_block']:6.3f} ms, "
        f"{row['launches_per_block']:6.1f} launches, {row['copies_per_block']:4.1f} copies, "
        f"{row['pieces_per_block']:3.1f} compiled pieces per block"
    )


def main() -> None:
    """Run the file by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--recipes", default="folded", help="Octavo recipes, separated by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to time")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("host: there is no CUDA GPU here, and it times the host's work for one.")
    rows = bench_host(
        [name for name in given.recipes.split(",") if name],
        steps=given.steps,
        report=lambda row: print(line(row), flush=True),
        note=lambda text: print(text, flush=True),
    )
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("octavo", "torchao", "triton"):
        if importlib.util.find_spec(package) is not None:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "not installed, on the path"
    if given.json is not None:
        found = {"hardware": torch.cuda.get_device_name(), "versions": versions, "rows": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
