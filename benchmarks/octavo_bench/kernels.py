"""Time each fused kernel beside a plain copy of as many bytes.

A kernel must move every input once per pass and every result once. Most take one pass. Where the scales of whole
columns or of a matrix must be known before the first code is written, there is a second; the bytes are then those of
both passes. A second read of a program's own row comes from the cache and is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.cli.flags import positive
from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels import record
from octavo.kernels.activation import (
    activation,
    activation_and_inputs,
    activation_backward,
    activation_backward_plain,
)
from octavo.kernels.cross_entropy import cross_entropy_
from octavo.kernels.norm import layer_norm, rms_norm, rms_norm_backward
from octavo.kernels.quantize import quantize_pair
from octavo.kernels.rotary import rotate
from octavo.kernels.target import Target
from octavo.kernels.transpose import transpose
from octavo.nn.weights import quantized_weights, weights_changed
from octavo.numerics import Quantized
from octavo.train.timing import milliseconds, warm_up
from octavo_bench.cli import TO_STDOUT, Names, Output, command_line, device_named
from octavo_bench.rates import copy_rate
from octavo_bench.results import failure

Row = dict[str, Any]

BY_ROW = Target("e4m3", "row", "power_of_two")
BY_COLUMN = Target("e4m3", "column", "power_of_two")
BY_TILE = Target("e4m3", "1x128", "power_of_two")
BY_TENSOR = Target("e5m2", "tensor", "float32")

TOKENS, DIM, FFN, VOCAB = 16384, 4096, 14336, 128256
"""Llama-8B's widths, and two sequences of 8,192 tokens."""
HEAD_DIM = 128
CHUNK = 4096
"""Tokens whose logits are computed at a time."""
SMALL = (128, 256)
"""The largest shape on a CPU, where only the result counts."""


class Prepared(NamedTuple):
    """A kernel with its operands."""

    call: Callable[[], Any]
    reads: Sequence[Tensor]
    """Operands that a pass reads."""
    writes: Sequence[Tensor] | None = None
    """Tensors that are written; None for those that the call returns."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, a shape, and how to make the one ready for the other."""

    kernel: str
    """Name in results."""
    shape: tuple[int, int]
    """Rows and columns of its main operand."""
    prepare: Callable[[Draw, int, int], Prepared]
    """(random matrices, rows, columns) -> the call."""
    passes: int = 1
    """Reads of its operands from memory."""


class Draw:
    """Random normal BF16 matrices, the same ones every time."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Return the next matrix."""
        return torch.randn(shape, generator=self._generator, dtype=torch.bfloat16, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        """Return powers of two, FP32, as the scales of a row target are."""
        exponents = torch.randint(-12, -6, shape, generator=self._generator, device=self.device)
        return torch.exp2(exponents.float())


def bench_kernels(
    names: tuple[str, ...] = (),
    *,
    device: str = "cuda",
    repeats: int = 20,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return one row per kernel and shape, as the result kind `kernels` has them.

    A kernel that fails, or that only its slow reference can stand in for, has a row with `error` and no figures, and
    the others go on. On a CPU it is the references that run, on small shapes.

    Args:
        names: run the kernels whose name begins with one of these; all if empty.
        repeats: calls to time; the median counts.
        report: called with each row as it comes.
    """
    rows: list[Row] = []
    for case in CASES:
        if names and not case.kernel.startswith(names):
            continue
        height, width = case.shape if device == "cuda" else map(min, case.shape, SMALL)
        row: Row = {"kernel": case.kernel, "shape": f"{height} x {width}"}
        try:
            row |= _measure(case, height, width, device, repeats)
        except Exception as error:  # one that fails must not lose the others
            row["error"] = failure(error)
        rows.append(row)
        report(row)
    return rows


def _measure(case: Case, height: int, width: int, device: str, repeats: int) -> Row:
    call, reads, writes = case.prepare(Draw(device), height, width)
    with record() as ledger:
        results = call()
    if ledger.fallbacks:
        raise UnsupportedError(ledger.fallbacks[0])
    moved = case.passes * _bytes(reads) + _bytes(_tensors(results) if writes is None else writes)
    del results
    warm_up(call, device, seconds=0.05)
    ms = statistics.median(milliseconds(call, device, repeats, queued=True, cold=True))
    rate = moved / ms / 1e6
    return {
        "ms": round(ms, 4),
        "bytes": moved,
        "passes": case.passes,
        "gb_per_s": round(rate, 1),
        "ratio_to_copy": round(rate / copy_rate(device, max(moved // 2, 1), repeats), 3),
    }


def _bytes(tensors: Sequence[Tensor] | Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(result: object) -> Iterator[Tensor]:
    """Yield the tensors in what a kernel returned, however nested."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


def _rows(draw: Draw, m: int, n: int) -> Prepared:
    x = draw(m, n)
    return Prepared(lambda: quantize_pair([x], BY_ROW, None), [x])


def _columns(draw: Draw, m: int, n: int) -> Prepared:
    x = draw(m, n)
    return Prepared(lambda: quantize_pair([x], None, BY_ROW), [x])


def _folded_pair(draw: Draw, m: int, n: int) -> Prepared:
    x, row_fold, column_fold = draw(m, n), draw.scales(1, n), draw.scales(m, 1)
    return Prepared(
        lambda: quantize_pair([x], BY_ROW, BY_ROW, row_fold, column_fold),
        [x, row_fold, column_fold],
    )


def _pair_of(target: Target) -> Callable[[Draw, int, int], Prepared]:
    def prepare(draw: Draw, m: int, n: int) -> Prepared:
        x = draw(m, n)
        return Prepared(lambda: quantize_pair([x], target, target), [x])

    return prepare


def _transpose(draw: Draw, m: int, n: int) -> Prepared:
    codes = draw(m, n).to(torch.float8_e4m3fn)
    return Prepared(lambda: transpose(codes), [codes])


def _weights(draw: Draw, n: int, k: int) -> Prepared:
    weight = draw(n, k).requires_grad_()

    def call() -> Any:
        weights_changed()
        return quantized_weights([weight], BY_ROW)

    return Prepared(call, [weight])


def _swiglu(target: Target) -> Callable[[Draw, int, int], Prepared]:
    def prepare(draw: Draw, m: int, f: int) -> Prepared:
        gate, up = draw(m, f), draw(m, f)
        return Prepared(lambda: activation("silu", gate, up, target), [gate, up])

    return prepare


def _swiglu_and_inputs(target: Target) -> Callable[[Draw, int, int], Prepared]:
    def prepare(draw: Draw, m: int, f: int) -> Prepared:
        gate, up = draw(m, f), draw(m, f)
        return Prepared(lambda: activation_and_inputs("silu", gate, up, target), [gate, up])

    return prepare


def _hidden(draw: Draw, m: int, f: int, in_codes: bool) -> tuple[Tensor, Tensor | Quantized, Tensor | Quantized]:
    """The gradient of h, gate and up, these two perhaps as the forward keeps them in codes."""
    dh, gate, up = draw(m, f), draw(m, f), draw(m, f)
    if not in_codes:
        return dh, gate, up
    kept = activation_and_inputs("silu", gate, up, BY_ROW)[1]
    return dh, kept[0], kept[1]


def _swiglu_backward_folded(draw: Draw, m: int, f: int, from_codes: bool = False) -> Prepared:
    dh, gate, up = _hidden(draw, m, f, from_codes)
    hidden_scale, row_fold, column_fold = draw.scales(m, 1), draw.scales(1, 2 * f), draw.scales(m, 1)
    return Prepared(
        lambda: activation_backward(
            "silu", dh, gate, up, rows=BY_ROW, columns=BY_ROW, hidden=BY_COLUMN,
            hidden_scale=hidden_scale, row_fold=row_fold, column_fold=column_fold,
        ),
        [*_tensors([dh, gate, up]), hidden_scale, row_fold, column_fold],
    )  # fmt: skip


def _swiglu_backward_block(draw: Draw, m: int, f: int, from_codes: bool = False) -> Prepared:
    dh, gate, up = _hidden(draw, m, f, from_codes)
    return Prepared(
        lambda: activation_backward("silu", dh, gate, up, rows=BY_TILE, columns=BY_TILE, hidden=BY_TILE),
        list(_tensors([dh, gate, up])),
    )


def _swiglu_backward_plain(draw: Draw, m: int, f: int) -> Prepared:
    dh, gate, up = draw(m, f), draw(m, f), draw(m, f)
    return Prepared(lambda: activation_backward_plain("silu", dh, gate, up), [dh, gate, up])


def _rms_norm(draw: Draw, m: int, n: int) -> Prepared:
    x, weight = draw(m, n), draw(n)
    return Prepared(lambda: rms_norm(x, weight, 1e-5), [x, weight])


def _rms_norm_codes(draw: Draw, m: int, n: int) -> Prepared:
    x, weight, residual = draw(m, n), draw(n), draw(m, n)
    return Prepared(
        lambda: rms_norm(x, weight, 1e-5, residual=residual, target=BY_ROW, keep_y=False), [x, weight, residual]
    )


def _rms_norm_backward(draw: Draw, m: int, n: int) -> Prepared:
    dy, x, weight, residual = draw(m, n), draw(m, n), draw(n), draw(m, n)
    rstd = draw.scales(m)
    return Prepared(lambda: rms_norm_backward(dy, x, weight, rstd, residual), [dy, x, weight, rstd, residual])


def _layer_norm_codes(draw: Draw, m: int, n: int) -> Prepared:
    x, weight, bias = draw(m, n), draw(n), draw(n)
    return Prepared(lambda: layer_norm(x, weight, bias, 1e-5, target=BY_ROW, keep_y=False), [x, weight, bias])


def _rotary(draw: Draw, m: int, n: int) -> Prepared:
    x = draw(1, m, n // HEAD_DIM, HEAD_DIM)
    cos, sin = draw(m, HEAD_DIM // 2).float(), draw(m, HEAD_DIM // 2).float()
    return Prepared(lambda: rotate(x, cos, sin), [x, cos, sin])


def _cross_entropy(draw: Draw, m: int, v: int) -> Prepared:
    logits, targets = draw(m, v), torch.arange(m, device=draw.device) % v
    loss = torch.empty(m, dtype=torch.float32, device=draw.device)
    return Prepared(lambda: cross_entropy_(logits, targets), [logits, targets], [logits, loss])


_STREAM, _HIDDEN = (TOKENS, DIM), (TOKENS, FFN)

CASES = (
    *(
        case
        for shape in (_STREAM, _HIDDEN)
        for case in (
            Case("quantize rows", shape, _rows),
            Case("quantize columns", shape, _columns, passes=2),
            Case("quantize folded pair", shape, _folded_pair, passes=2),
            Case("quantize block pair", shape, _pair_of(BY_TILE)),
            Case("quantize tensor pair", shape, _pair_of(BY_TENSOR), passes=2),
            Case("transpose", shape, _transpose),
        )
    ),
    Case("quantize weights", (2 * FFN, DIM), _weights),
    Case("SwiGLU, row codes", _HIDDEN, _swiglu(BY_ROW)),
    Case("SwiGLU, 1x128 codes", _HIDDEN, _swiglu(BY_TILE)),
    Case("SwiGLU, row codes, and its inputs", _HIDDEN, _swiglu_and_inputs(BY_ROW)),
    Case("SwiGLU, 1x128 codes, and its inputs", _HIDDEN, _swiglu_and_inputs(BY_TILE)),
    Case("SwiGLU backward, folded codes", _HIDDEN, _swiglu_backward_folded, passes=2),
    Case("SwiGLU backward, 1x128 codes", _HIDDEN, _swiglu_backward_block, passes=2),
    Case("SwiGLU backward of codes, folded", _HIDDEN, partial(_swiglu_backward_folded, from_codes=True), passes=2),
    Case("SwiGLU backward of codes, 1x128", _HIDDEN, partial(_swiglu_backward_block, from_codes=True), passes=2),
    Case("SwiGLU backward, plain", _HIDDEN, _swiglu_backward_plain),
    Case("RMS norm", _STREAM, _rms_norm),
    Case("RMS norm of a sum, row codes", _STREAM, _rms_norm_codes),
    Case("RMS norm backward", _STREAM, _rms_norm_backward),
    Case("layer norm, row codes", _STREAM, _layer_norm_codes),
    Case("rotary", _STREAM, _rotary),
    Case("rotary", (TOKENS, DIM // 4), _rotary),
    Case("cross entropy in place", (CHUNK, VOCAB), _cross_entropy),
)
"""All cases. A new kernel is a function above and a line here."""


def command(*, only: Names = (), device: str = "auto", repeats: int = 20, output: Output = TO_STDOUT) -> int:
    """Time each fused kernel beside a copy of as many bytes, at the shapes of a Llama-8B; small ones on a CPU.

    Examples:

        octavo bench kernels
        octavo bench kernels --only quantize --only transpose
        octavo bench kernels --device cpu

    Parameters
    ----------
    only
        Beginnings of the names of the kernels to run; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Calls timed, after a warm-up; the median counts.
    """
    names = list(dict.fromkeys(case.kernel for case in CASES))
    for start in only:
        if not any(name.startswith(start) for name in names):
            near = did_you_mean(start, names)
            raise ConfigError(f"--only: no kernel begins with '{start}'.{near} Kernels: {', '.join(names)}.")
    repeats = positive("--repeats", repeats)
    rows = bench_kernels(only, device=device_named(device), repeats=repeats, report=output.lines(_name, _line))
    return output.finish(
        "kernels", rows, command_line("octavo bench kernels", only=only, repeats=repeats), device=device
    )


def _name(row: Row) -> str:
    return f"{row['kernel']:<30} {row['shape']:<15}"


def _line(row: Row) -> str:
    return f"{row['ms']:>8.3f} ms  {row['gb_per_s']:>7.1f} GB/s  {row['ratio_to_copy']:.2f} of a copy's"
