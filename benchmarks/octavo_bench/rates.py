"""Ceilings of the machine: bandwidth of a copy, and throughput of GEMMs at a workload's shapes.

They are measured in the run that they are compared with, on random normal data: zeros draw less power, and a GPU that
draws less power runs faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo import kernels
from octavo.lab.monitor.power import PowerMeter
from octavo.numerics import Quantized
from octavo_bench.implementations import BF16, Implementation
from octavo_bench.timing import median_ms
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
"""FP8 precisions of a GEMM: granularities of its operands, and accumulation. BF16 is measured besides them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Ceilings of the machine, median of several calls."""

    copy_gb_per_s: float
    """Bytes read and written by a copy on the device, in 1e9 per second."""
    tflops: dict[str, float]
    """By precision: FLOPs of all GEMMs of a step over their time."""


def measure(workload: Workload, device: str, *, repeats: int = 10) -> Rates:
    """Return the rates of this machine for the GEMMs of a workload."""
    shapes = gemm_shapes(workload)
    names = (BF16, *PRECISIONS)
    return Rates(
        copy_gb_per_s=round(copy_rate(device), 1),
        tflops={name: round(_tflops(shapes, name, device, repeats), 1) for name in names},
    )


def gemm_shapes(workload: Workload) -> Mapping[Shape, int]:
    """Return the number of GEMMs of a step by shape."""
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
    """Return the bandwidth of `copy_` on the device, read and written together, in 1e9 bytes per second.

    Args:
        size: bytes to copy; None: more than any cache holds.
    """
    size = size or (2**30 if device == "cuda" else 2**24)
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, repeats, cold=True) / 1e6


def _tflops(shapes: Mapping[Shape, int], precision: str, device: str, repeats: int) -> float:
    spent = sum(count * _gemm_ms(shape, precision, device, repeats) for shape, count in shapes.items())
    return sum(count * 2 * m * n * k for (m, n, k), count in shapes.items()) / spent / 1e9


def _gemm_ms(shape: Shape, precision: str, device: str, repeats: int) -> float:
    if precision == BF16:
        a_MK, b_NK = normal(shape, device)
        call = partial(torch.matmul, a_MK, b_NK.t())
    else:
        left, right, accumulate = PRECISIONS[precision]
        call = partial(kernels.gemm, *quantized(shape, (left, right), device), torch.bfloat16, accumulate)
    return median_ms(call, device, repeats, calls=2, seconds=0.02)


def normal(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Return A (M, K) and B (N, K): random normal, BF16."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, k, generator=generator, dtype=torch.bfloat16, device=device)

    return matrix(m), matrix(n)


def quantized(
    shape: Shape, granularities: Iterable[str], device: str, format: str = "e4m3"
) -> tuple[Quantized, Quantized]:
    """Return the same A and B as codes of a format, each with scales of its granularity."""
    a, b = (
        kernels.quantize(matrix, format, granularity)
        for matrix, granularity in zip(normal(shape, device), granularities, strict=True)
    )
    return a, b


def floor_ms(workload: Workload, implementation: Implementation, rates: Rates, attention_ms: float) -> float:
    """Return the floor of an implementation in milliseconds: a step with only the unavoidable work.

        floor = GEMMs at the rate of their precision + attention as in BF16 + unavoidable bytes at the rate of a copy

    GEMMs and attention are calls into cuBLAS and cuDNN that read their operands from memory and write their results
    there. Between two of them is one pass that reads each of its operands once and writes each of its results once
    (`block_bytes`, `model_bytes`). The floor leaves out launches, second reads for an amax, the scales (a hundredth of
    the codes) and the tables of the rotary embedding. Fusion into the GEMMs, which vendors do not offer, could go below
    it.
    """
    moved = step_bytes(workload, fp8=implementation.is_fp8)
    return gemm_ms(workload, implementation, rates) + attention_ms + moved / rates.copy_gb_per_s / 1e6


def gemm_ms(workload: Workload, implementation: Implementation, rates: Rates) -> float:
    """Return the milliseconds of all GEMMs at the rates of their precision: fprop, dgrad, wgrad are a third each."""
    head = workload.vocab * workload.dim
    head_gemms = implementation.gemms if implementation.fp8_head else (BF16, BF16, BF16)
    teraflops = 2e-12 * workload.tokens
    return 1e3 * sum(
        teraflops * weights / rates.tflops[precision]
        for weights, gemms in ((workload.weights - head, implementation.gemms), (head, head_gemms))
        for precision in gemms
    )


def step_bytes(workload: Workload, *, fp8: bool) -> int:
    """Return the bytes that the passes of a step must move."""
    return workload.layers * block_bytes(workload, fp8=fp8) + (model_bytes(workload) if workload.vocab else 0)


def block_bytes(workload: Workload, *, fp8: bool) -> int:
    """Return the bytes that the passes of one block must move, forward and backward.

    T tokens, D width, E width of keys (and of values), F hidden width. BF16 has two bytes, a code one, and FP8 needs
    the codes of each operand twice: row-major and transposed, both written in the pass that reads.

    | pass | reads | writes |
    | --- | --- | --- |
    | residual add and norm, twice | stream, branch | stream, GEMM operand |
    | rotation, forward | Q, K | Q, K |
    | attention's result (FP8 only) | it | GEMM operand |
    | SwiGLU, forward | gate, up | GEMM operand |
    | SwiGLU, backward | its gradient, gate, up | both gradients as GEMM operands |
    | norm and residual add, backward, twice | its gradient, stream, stream's gradient | that; a GEMM operand (FP8) |
    | rotation, backward | gradients of Q, K; of V (FP8 only) | the same as GEMM operands |
    | weights (FP8 only) | each weight | both codes |

    If gate and up are saved in FP8, SwiGLU writes them in forward, and reads as much less in backward.
    """
    tokens, dim, ffn = workload.tokens, workload.dim, workload.ffn
    keys = dim // workload.heads * workload.kv_heads
    operand = 2  # bytes per element: BF16, or two codes
    norms = 2 * dim * (2 + 2 + 2 + operand)
    norms_backward = 2 * dim * (2 + 2 + 2 + 2 + (operand if fp8 else 0))
    rotation = (dim + keys) * (2 + 2)
    rotation_backward = (dim + keys + (keys if fp8 else 0)) * (2 + operand)
    attention = dim * (2 + operand) if fp8 else 0
    swiglu = ffn * (2 + 2 + operand) + ffn * (2 + 2 + 2 + 2 * operand)
    weights = sum(n * k for n, k in workload.block_gemms) * (2 + operand) if fp8 else 0
    return tokens * (norms + norms_backward + rotation + rotation_backward + attention + swiglu) + weights


def model_bytes(workload: Workload) -> int:
    """Return the bytes that a whole model moves besides its blocks.

    Embedding: rows read and written, forward and backward. Loss: logits read, their gradient written. Last norm: stream
    read and operand written; backward, gradient and stream read, gradient written. AdamW with BF16 states: parameter,
    gradient and both moments read, parameter and moments written; the norm for clipping reads the gradient once more.
    """
    tokens, dim, vocab = workload.tokens, workload.dim, workload.vocab
    parameters = workload.weights + vocab * dim  # the embedding has no GEMM
    embedding, last_norm = tokens * dim * 2 * 4, tokens * dim * 2 * 5
    return embedding + last_norm + tokens * vocab * 2 * 2 + parameters * 2 * (7 + 1)


def energy_row(power: PowerMeter, name: str, per_watt: float) -> dict[str, float | str]:
    """Return a GPU's watts times `per_watt`, its watts and its clock, or the reason why they are unknown."""
    if power.watts is None or power.mhz is None:
        return {"energy_missing": power.missing}
    return {name: round(power.watts * per_watt, 3), "watts": round(power.watts, 1), "mhz": round(power.mhz)}
