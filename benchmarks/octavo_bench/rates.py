"""The machine's own ceilings: how fast it copies, and how fast it multiplies matrices of a workload's shapes.

They are measured in the run that they are compared with, on random normal data: zeros draw less power, and a GPU that
draws less power runs faster.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import kernels
from octavo.numerics import Quantized
from octavo.train.timing import milliseconds, warm_up
from octavo_bench.implementations import BF16
from octavo_bench.workloads import Workload

Shape = tuple[int, int, int]
"""M, N, K of A (M, K) . B (N, K)^T."""

PRECISIONS: dict[str, tuple[str, str, str]] = {
    "tensor slow": ("tensor", "tensor", "slow"),
    "tensor fast": ("tensor", "tensor", "fast"),
    "row slow": ("row", "row", "slow"),
    "row fast": ("row", "row", "fast"),
    "block": ("1x128", "128x128", "slow"),
}
"""FP8 precisions of a GEMM: the granularity of its operands, and how it accumulates. BF16 stands beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the machine can do, median of several calls."""

    copy_gb_per_s: float
    """Bytes read and written by a copy on the device, in 1e9 a second."""
    tflops: dict[str, float]
    """By precision: the operations of all GEMMs of a step by the time they take."""


def measure(workload: Workload, device: str, *, repeats: int = 10) -> Rates:
    """Return the rates of this machine for the GEMMs of a workload."""
    shapes = gemm_shapes(workload)
    names = (BF16, *PRECISIONS)
    return Rates(
        copy_gb_per_s=round(copy_rate(device), 1),
        tflops={name: round(_tflops(shapes, name, device, repeats), 1) for name in names},
    )


def gemm_shapes(workload: Workload) -> Mapping[Shape, int]:
    """Return the GEMMs of a step by shape, and how often each is computed."""
    products = [(product, workload.layers) for product in workload.block_gemms]
    if workload.vocab:
        products.append(((workload.vocab, workload.dim), 1))
    shapes: Counter[Shape] = Counter()
    for (outputs, inputs), count in products:
        for shape in (
            (workload.tokens, outputs, inputs),  # fprop
            (workload.tokens, inputs, outputs),  # dgrad
            (outputs, inputs, workload.tokens),  # wgrad
        ):
            shapes[shape] += count
    return shapes


def copy_rate(device: str, size: int | None = None, repeats: int = 20) -> float:
    """Return how fast `copy_` moves bytes on the device, read and written together, in 1e9 a second.

    Args:
        size: bytes to copy; as many as exceed every cache where it is None.
    """
    size = size or (2**30 if device == "cuda" else 2**24)
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    warm_up(lambda: target.copy_(source), device, seconds=0.05)
    times = milliseconds(lambda: target.copy_(source), device, repeats, queued=True, cold=True)
    return 2 * size / statistics.median(times) / 1e6


def _tflops(shapes: Mapping[Shape, int], precision: str, device: str, repeats: int) -> float:
    spent = sum(count * _gemm_ms(shape, precision, device, repeats) for shape, count in shapes.items())
    return sum(count * 2 * m * n * k for (m, n, k), count in shapes.items()) / spent / 1e9


def _gemm_ms(shape: Shape, precision: str, device: str, repeats: int) -> float:
    if precision == BF16:
        a_MK, b_NK = normal(shape, device)

        def call() -> Tensor:
            return a_MK @ b_NK.t()
    else:
        left, right, accumulate = PRECISIONS[precision]
        a, b = quantized(shape, (left, right), device)

        def call() -> Tensor:
            return kernels.gemm(a, b, torch.bfloat16, accumulate)

    warm_up(call, device, calls=2, seconds=0.02)
    return statistics.median(milliseconds(call, device, repeats, queued=True))


def normal(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Return A (M, K) and B (N, K): random normal, BF16."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, k, generator=generator, dtype=torch.bfloat16, device=device)

    return matrix(m), matrix(n)


def quantized(shape: Shape, granularities: Iterable[str], device: str) -> tuple[Quantized, Quantized]:
    """Return the same A and B as E4M3 codes, each with scales of its granularity."""
    a, b = (
        kernels.quantize(matrix, "e4m3", granularity)
        for matrix, granularity in zip(normal(shape, device), granularities, strict=True)
    )
    return a, b
