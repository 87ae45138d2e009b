"""Time a step of a stack of Llama blocks, forward and backward, in BF16, in torchao and by every recipe.

The stack has no embedding and no head, so that it is the blocks that are compared. All implementations run one after
another in one process on the same random normal data; each is the median of several steps after a warm-up. One profiled
step says where the time goes.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo
from octavo import kernels, recipes
from octavo.errors import UnsupportedError
from octavo.models.config import ModelConfig
from octavo.models.llama import Block, rotary_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The shape of a stack and of the batch that goes through it."""

    name: str
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    batch: int
    sequence: int


WORKLOADS = {
    "llama-8b-stack": Workload(
        name="llama-8b-stack", dim=4096, ffn=14336, heads=32, kv_heads=8, layers=8, batch=2, sequence=8192
    ),
    "tiny": Workload(name="tiny", dim=128, ffn=256, heads=4, kv_heads=2, layers=2, batch=2, sequence=64),
}

CATEGORIES = {
    "attention": ("attention", "fmha", "sdpa", "cudnn_generated", "flash"),
    "gemm": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "s16816"),
}


class Stack(nn.Module):
    """Llama blocks in a row, BF16, with their rotary tables."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        config = ModelConfig(
            vocab=16,
            dim=workload.dim,
            ffn=workload.ffn,
            heads=workload.heads,
            kv_heads=workload.kv_heads,
            layers=workload.layers,
            sequence=workload.sequence,
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(workload.layers))
        cos_TE, sin_TE = rotary_tables(config.head_dim, workload.sequence, config.rope_theta)
        self.register_buffer("cos", cos_TE, persistent=False)
        self.register_buffer("sin", sin_TE, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after the last block."""
        for block in self.layers:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return x_BTD


Prepare = Callable[[nn.Module, int], None]
"""(BF16 stack, tokens a step): makes the stack into an implementation, in place."""


def implementations() -> dict[str, Prepare]:
    """Return every implementation by name. torchao's are there when it is installed."""
    found: dict[str, Prepare] = {"bf16": lambda model, tokens: None}
    if importlib.util.find_spec("torchao") is not None:
        found |= {f"torchao {name}": partial(_convert_torchao, recipe=name) for name in ("tensorwise", "rowwise")}
    octavos = [name for name in recipes.names() if name != "bf16"]
    return found | {f"octavo {name}": partial(_convert_octavo, recipe=name) for name in octavos}


def _convert_torchao(model: nn.Module, tokens: int, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def _convert_octavo(model: nn.Module, tokens: int, recipe: str) -> None:
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0), tokens=tokens, strict=True)


def bench_step(
    workload: Workload,
    names: tuple[str, ...] = (),
    *,
    device: str = "cuda",
    compile: bool = True,
    steps: int = 20,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Return one row an implementation: ms, ratio_to_bf16, peak_gib, tokens_per_s, ms by category, FP8 GEMMs a step.

    Args:
        names: implementations to run, BF16 always first; all where empty.
        report: called with each row as it comes.

    Raises:
        UnsupportedError: a name that is not there.
    """
    known = implementations()
    if missing := [name for name in names if name not in known]:
        raise UnsupportedError(f"no implementation '{missing[0]}' here. There are: {', '.join(known)}.")
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(("bf16", *(names or known))):
        row = _measure(workload, name, known[name], device, compile, steps)
        row["ratio_to_bf16"] = round(rows[0]["ms"] / row["ms"], 3) if rows else 1.0
        rows.append(row)
        report(row)
    return rows


def _measure(workload: Workload, name: str, prepare: Prepare, device: str, compile: bool, steps: int) -> dict[str, Any]:
    _free(device)
    step = _make_step(workload, prepare, device, compile)
    with _attention(device):
        for _ in range(3):
            step()
        with kernels.record() as ledger:
            step()
        times, peak = _time(step, steps, device)
        categories = _profile(step) if device == "cuda" else {}
    ms = statistics.median(times)
    return {
        "workload": workload.name,
        "implementation": name,
        "ms": round(ms, 3),
        "ratio_to_bf16": 1.0,
        "peak_gib": round(peak, 2),
        "tokens_per_s": round(workload.batch * workload.sequence / ms * 1e3),
        "spread_ms": round(max(times) - min(times), 3),
        **{f"{category}_ms": round(value, 2) for category, value in categories.items()},
        "fp8_gemms": dict(ledger.gemms),
        "fallbacks": ledger.fallbacks,
        "shape": asdict(workload),
    }


def _make_step(workload: Workload, prepare: Prepare, device: str, compile: bool) -> Callable[[], None]:
    """Return a function that runs one forward and backward of a new stack on random data."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(workload).to(torch.bfloat16)
        x = torch.randn(workload.batch, workload.sequence, workload.dim, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn_like(x)
    model.cos, model.sin = model.cos.float(), model.sin.float()
    prepare(model, workload.batch * workload.sequence)
    if compile:
        for block in model.layers:
            block.compile(fullgraph=True)

    def step() -> None:
        model(x).backward(gradient)
        model.zero_grad(set_to_none=True)
        x.grad = None

    return step


@contextmanager
def _attention(device: str) -> Iterator[None]:
    """cuDNN's attention where it runs: the fastest on Hopper, and the same for every implementation."""
    if device != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        yield


def _time(step: Callable[[], None], steps: int, device: str) -> tuple[list[float], float]:
    """Return the milliseconds of each step, by device events, and the peak memory in GiB."""
    if device != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times, 0.0
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairwise(events)]
    return times, torch.cuda.max_memory_allocated() / 2**30


def _profile(step: Callable[[], None]) -> dict[str, float]:
    """Return the GPU milliseconds of one step by category, from the profiler's kernel names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    totals = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
    for event in profile.key_averages():
        if milliseconds := event.device_time_total / 1e3:
            totals[_category(event.key.lower())] += milliseconds
    return totals


def _category(kernel: str) -> str:
    if kernel.startswith("triton_"):  # compiled passes: named after all they fuse, a GEMM's name among it
        return "elementwise"
    for category, words in CATEGORIES.items():
        if any(word in kernel for word in words):
            return category
    return "elementwise"


def _free(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
