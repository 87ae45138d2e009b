"""Time every GEMM kernel available on this machine, and BF16, on the same random normal matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.gemm import KERNELS, GemmKernel, integer
from octavo.lab.monitor.power import PowerMeter
from octavo.lab.monitor.system import SystemProbe
from octavo.numerics import PER_ROW, Quantized
from octavo_bench.implementations import BF16
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, by_result, device_named, positive
from octavo_bench.rates import Shape, energy_row, normal, quantized
from octavo_bench.render import grouped, has_failed, table
from octavo_bench.results import Row
from octavo_bench.timing import Case, attempts, beside_first, median_ms

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 14336, 4096),
    (16384, 28672, 4096),
    (8192, 128256, 4096),
    (4096, 2048, 2048),
    (16384, 8192, 2048),
)
"""Square; Llama-8B's projections, feed-forward and head; smaller ones."""

ENERGY_S = 1.0
"""Seconds of calls per energy measurement, which span about ten updates of the GPU's counter."""
INT8_ROWS = "INT8 row"
"""Operands in INT8; all others are E4M3."""
OPERANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tensor": ("tensor", "tensor", ("slow", "fast")),
    "row": ("row", "row", ("slow", "fast")),
    "1x128 x 128x128": ("1x128", "128x128", ("slow",)),
    "1x128 x 1x128": ("1x128", "1x128", ("slow",)),
    INT8_ROWS: ("row", "row", ("exact",)),
}
"""Scale granularities of the operands, and the accumulation modes to time."""


def _own_reason(a: Quantized, b: Quantized) -> str | None:
    """Return why Octavo's own GEMM cannot take these operands in E4M3, or None."""
    if not a.codes.is_cuda or {a.granularity, b.granularity} != {PER_ROW} or integer.is_integer(a):
        return "it takes E4M3 with row scales, on a GPU"
    return integer.unsupported_reason_device(a.codes.device)


OWN = GemmKernel("triton.row", _own_reason, integer.gemm)
"""The kernel of INT8, with E4M3: no layer calls it."""


def by_kernel(rows: Sequence[Row]) -> str:
    """Return a line per shape and a column per kernel: TFLOP/s, with the ratio to BF16's in brackets."""
    return _crossed(rows, _cell)


def energy_by_kernel(rows: Sequence[Row]) -> str:
    """Return a line per shape and a column per kernel: picojoules per FLOP; empty if no energy was measured."""
    measured = [row for row in rows if row.get("pj_per_flop") is not None]
    return _crossed(measured, lambda row: f"{row['pj_per_flop']:.2f}") if measured else ""


def _crossed(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    keys = ("kernel", "operands", "accumulate")
    columns = grouped(rows, *keys)
    titles = ("BF16" if kernel == BF16 else f"{scales}, {sums}: `{kernel}`" for kernel, scales, sums in columns)
    body = []
    for (shape,), of_shape in grouped(rows, "shape").items():
        cells = {key: cell(of_kernel[0]) for key, of_kernel in grouped(of_shape, *keys).items()}
        body.append((shape.replace("x", " x "), *(cells.get(column, "") for column in columns)))
    return table(("M x N x K", *titles), body)


def _cell(row: Row) -> str:
    if has_failed(row):
        return f"failed: {row['error']}"
    return f"{row['tflops']:,.0f}" + ("" if row["kernel"] == BF16 else f" ({row['ratio_to_bf16']:.2f})")


KIND = Kind(
    name="gemm",
    keys={
        "shape": str, "kernel": str, "operands": str, "accumulate": str, "tflops": float, "ratio_to_bf16": float,
    },
    columns=(
        ("M x N x K", "{shape}"),
        ("kernel", "{kernel}"),
        ("scales", "{operands}"),
        ("accumulation", "{accumulate}"),
        ("TFLOP/s", "{tflops:.1f}"),
        ("times BF16's speed", "{ratio_to_bf16:.2f}"),
        ("pJ per FLOP", "{pj_per_flop:.2f}"),
    ),
    names=4,
    show=by_kernel,
    tables={"gemm-energy": by_result("gemm", energy_by_kernel)},
)  # fmt: skip


def bench_gemm(shapes: tuple[Shape, ...] = SHAPES, *, device: str = "cuda", repeats: int = 20) -> Iterator[Row]:
    """Yield one row per shape and kernel that supports the operands.

    Rows of kernels that fail have `error` and no figures.

    Args:
        repeats: timed calls; the median is reported.
    """
    for shape in shapes:
        yield from beside_first(attempts(_cases(shape, device, repeats)))


def _measure(shape: Shape, call: Callable[[], Tensor], device: str, repeats: int) -> Row:
    ms = median_ms(call, device, repeats, seconds=0.1)
    row = {"tflops": round(2 * math.prod(shape) / ms / 1e9, 3), "ms": round(ms, 4)}
    return row | (_energy(shape, call, ms) if device == "cuda" else {})


def _cases(shape: Shape, device: str, repeats: int) -> Iterator[Case]:
    """Yield the kernels to time on one shape, BF16 first."""
    for about, call in _calls(shape, device):
        yield about, partial(_measure, shape, call, device, repeats)


def _calls(shape: Shape, device: str) -> Iterator[tuple[Row, Callable[[], Tensor]]]:
    name = "x".join(map(str, shape))
    a_MK, b_NK = normal(shape, device)
    yield {"shape": name, "kernel": BF16, "operands": BF16, "accumulate": "slow"}, lambda: a_MK @ b_NK.t()
    for scales, (left, right, accumulations) in OPERANDS.items():
        a, b = quantized(shape, (left, right), device, "int8" if scales == INT8_ROWS else "e4m3")
        for kernel in (*KERNELS, OWN):
            if kernel.unsupported_reason(a, b) is not None or (kernel.name == "reference" and device == "cuda"):
                continue
            if scales == "tensor" and kernel.name == "scaled_mm.row":
                continue  # broadcasts the scale over the rows: the same call as "row"
            for accumulate in accumulations:
                row = {"shape": name, "kernel": kernel.name, "operands": scales, "accumulate": accumulate}
                yield row, partial(kernel.run, a, b, torch.bfloat16, accumulate == "fast")


def _energy(shape: Shape, call: Callable[[], Tensor], ms: float) -> Row:
    """Return picojoules per FLOP over `ENERGY_S` seconds of calls, watts and clock, or why they are unknown."""
    calls = max(1, round(1e3 * ENERGY_S / ms))
    torch.cuda.synchronize()
    began = perf_counter()
    with PowerMeter(SystemProbe(torch.cuda.current_device())) as power:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return energy_row(power, "pj_per_flop", 1e12 * (perf_counter() - began) / calls / (2 * math.prod(shape)))


def parse_shape(text: str) -> Shape:
    """Return M, N, K of a text such as `8192x4096x4096`.

    Raises:
        ConfigError: it is not three positive numbers with an `x` between them.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"--shape: '{text}' is not MxNxK, as 8192x4096x4096 is.")
    m, n, k = map(int, match.groups())
    return m, n, k


def command(*, shape: Names = (), device: str = "auto", repeats: int = 20, output: Output = TO_STDOUT) -> int:
    """Time every FP8 GEMM kernel of this machine, and BF16, on random normal matrices.

    Examples:

        octavo bench gemm
        octavo bench gemm --shape 8192x4096x4096 --shape 16384x28672x4096
        octavo bench gemm --shape 64x64x64 --device cpu

    Parameters
    ----------
    shape
        MxNxK of A (M, K) times B (N, K) transposed; repeatable. By default the shapes of a Llama-8B.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Timed calls, after a warm-up; the median is reported.
    """
    shapes, repeats = tuple(map(parse_shape, shape)) or SHAPES, positive("--repeats", repeats)
    rows = bench_gemm(shapes, device=device_named(device), repeats=repeats)
    return output.finish(KIND, rows, device=device, shape=shape, repeats=repeats)
