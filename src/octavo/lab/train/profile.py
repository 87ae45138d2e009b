"""GPU time of a step by kind of kernel, from PyTorch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.lab.train.timing import Kernel, busy, kernels_of

CATEGORIES = {
    "communication": ("nccl",),
    "optimizer": ("adam", "multi_tensor", "_update_", "_momentum_", "_coefficient", "_squares_", "_store_kernel"),
    "attention": ("attention", "fmha", "sdpa", "cudnn_generated", "flash"),
    "gemm": ("gemm", "_grouped_integer_kernel", "nvjet", "cutlass", "cublas", "xmma", "s16816"),
}
"""Substrings of kernel names by category; the first match counts. All other kernels are element-wise."""
QUANTIZERS = (
    *("_rows_kernel", "search_strip", "write_strip", "scales_kernel", "transpose_tile", "_stack_kernel"),
    *("_requantize_kernel", "_quantize_kernel", "_begin_kernel", "_settle_kernel", "_write_kernel"),
    *("_group_rows_kernel", "_group_columns_kernel", "_group_transpose_kernel"),
    *("_batch_search_kernel", "_batch_write_kernel", "_batch_transpose_kernel"),
)
"""Octavo's kernels that only make codes and scales, by their names; norms and activations that make codes are not."""
PARTS = ("gemm", "attention", "elementwise", "optimizer", "communication")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """GPU time of one step, in milliseconds."""

    parts: dict[str, float]
    """By part, those of `PARTS`."""
    busy: float
    """Time with at least one kernel running."""
    kernels: list[dict[str, Any]]
    """Each kernel by name, with its calls and milliseconds per step, the longest first."""

    @property
    def quantize(self) -> float:
        """Time of the element-wise kernels that only quantise."""
        return sum((kernel["ms"] for kernel in self.kernels if kernel["name"].startswith(QUANTIZERS)), 0.0)

    def spent(self, ms: float) -> dict[str, float]:
        """Return the milliseconds of each part, for a row of a result; `ms` is the time of a step without the profiler.

        `idle_ms` is the rest of it, in which no kernel runs. Parts without kernels are left out. Where kernels overlap,
        the parts add up to more than the step.
        """
        usual = ("gemm", "attention", "elementwise")
        parts = {part: self.parts[part] for part in PARTS if part in usual or self.parts[part]}
        spent = {f"{part}_ms": round(value, 2) for part, value in parts.items()}
        return spent | {"idle_ms": round(max(ms - self.busy, 0.0), 2)}


def profile(step: Callable[[], Any], steps: int = 3) -> Profile:
    """Run some steps under the profiler and return the mean of one."""
    return summarise(kernels_of(step, steps), steps)


def summarise(kernels: Sequence[Kernel], steps: int) -> Profile:
    """Return the profile of one step from the kernels of several."""
    calls: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for kernel in kernels:
        calls[kernel.name] += 1
        microseconds[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
    parts = dict.fromkeys(PARTS, 0.0)
    for name, spent in microseconds.items():
        parts[category(name)] += spent / 1e3 / steps
    return Profile(
        parts=parts,
        busy=busy(kernels) / 1e3 / steps,
        kernels=[
            {"name": name, "calls": round(calls[name] / steps, 2), "ms": round(spent / 1e3 / steps, 4)}
            for name, spent in microseconds.most_common()
        ],
    )


def category(name: str) -> str:
    """Return the part that a kernel belongs to, by its name."""
    lower = name.lower()
    if lower.startswith("triton_"):  # compiled passes: named after all they fuse, a GEMM's name among it
        return "elementwise"
    for part, words in CATEGORIES.items():
        if any(word in lower for word in words):
            return part
    return "elementwise"
