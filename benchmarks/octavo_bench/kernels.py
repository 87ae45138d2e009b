"""Time each fused kernel against a plain copy of as many bytes.

A kernel reads every input once per pass and writes every result once. Most take one pass. Per-column and per-tensor
scales must be known before the first code is written and take a second pass; the bytes are then those of both. A
program's second read of its own row hits the cache and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels import record
from octavo.kernels.activation import (
    Factors,
    Targets,
    activate,
    activation_backward,
    activation_backward_plain,
)
from octavo.kernels.cross_entropy import cross_entropy_
from octavo.kernels.norm import normalise, normalise_backward
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize_pair
from octavo.kernels.rotary import rotate
from octavo.kernels.transpose import transpose
from octavo.nn.weight_codes import quantize_weights
from octavo.numerics import PER_ROW, Quantized, dequantize
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, positive
from octavo_bench.rates import copy_rate
from octavo_bench.results import Row
from octavo_bench.timing import attempt, median_ms

BY_ROW = QuantSpec("e4m3", "row", "power_of_two")
ROTATED = QuantSpec("int8", "row", "float32", rotation=256)
BY_COLUMN = QuantSpec("e4m3", "column", "power_of_two")
BY_TILE = QuantSpec("e4m3", "1x128", "power_of_two")
BY_TENSOR = QuantSpec("e5m2", "tensor", "float32")

TOKENS, DIM, FFN, VOCAB = 16384, 4096, 14336, 128256
"""Llama-8B's widths, and two sequences of 8,192 tokens."""
HEAD_DIM = 128
CHUNK = 4096
"""Tokens whose logits are computed at a time."""
SMALL = (128, 256)
"""Largest shape on a CPU, where only the result matters."""


KIND = Kind(
    name="kernels",
    keys={
        "kernel": str, "shape": str, "ms": float, "bytes": int, "passes": int, "gb_per_s": float,
        "ratio_to_copy": float,
    },
    columns=(
        ("kernel", "{kernel}"),
        ("shape", "{shape}"),
        ("ms", "{ms:.3f}"),
        ("passes", "{passes}"),
        ("GB/s", "{gb_per_s:,.0f}"),
        ("of a copy's", "{ratio_to_copy:.2f}"),
    ),
    names=2,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel at a shape."""

    kernel: str
    """Name in results."""
    shape: tuple[int, int]
    """Rows and columns of its main operand."""
    operands: Callable[[Draw, int, int], Sequence[Any]]
    """(random matrices, rows, columns) -> tensors read by a pass, possibly nested."""
    call: Callable[..., Any]
    """Called with the operands."""
    passes: int = 1
    """Reads of its operands from memory."""
    writes: Callable[..., Sequence[Tensor]] | None = None
    """(operands) -> written tensors; None: those returned by the call."""


class Draw:
    """Reproducible random normal BF16 matrices."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        """Return the next matrix."""
        return torch.randn(shape, generator=self._generator, dtype=torch.bfloat16, device=self.device)

    def scales(self, *shape: int) -> Tensor:
        """Return powers of two, FP32, like the scales of a row target."""
        exponents = torch.randint(-12, -6, shape, generator=self._generator, device=self.device)
        return torch.exp2(exponents.float())


def bench_kernels(names: tuple[str, ...] = (), *, device: str = "cuda", repeats: int = 20) -> Iterator[Row]:
    """Yield one row per kernel and shape.

    Rows of kernels that fail, or fall back to the slow reference, have `error` and no figures. On a CPU the references
    run, on small shapes.

    Args:
        names: prefixes of the kernels to run; all if empty.
        repeats: timed calls; the median is reported.
    """
    for case in CASES:
        if names and not case.kernel.startswith(names):
            continue
        height, width = case.shape if device == "cuda" else map(min, case.shape, SMALL)
        row: Row = {"kernel": case.kernel, "shape": f"{height} x {width}"}
        yield attempt(row, partial(_measure, case, height, width, device, repeats))


def _measure(case: Case, height: int, width: int, device: str, repeats: int) -> Row:
    operands = case.operands(Draw(device), height, width)
    call = partial(case.call, *operands)
    with record() as ledger:
        results = call()
    if ledger.fallbacks:
        raise UnsupportedError(ledger.fallbacks[0])
    written = results if case.writes is None else case.writes(*operands)
    moved = case.passes * _bytes(operands) + _bytes(written)
    del results, written
    ms = median_ms(call, device, repeats, cold=True)
    rate = moved / ms / 1e6
    return {
        "ms": round(ms, 4),
        "bytes": moved,
        "passes": case.passes,
        "gb_per_s": round(rate, 1),
        "ratio_to_copy": round(rate / copy_rate(device, max(moved // 2, 1), repeats), 3),
    }


def _bytes(tensors: object) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(tensors) if isinstance(each, Tensor))


Operands = Callable[[Draw, int, int], Sequence[Any]]


def _one(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    return (draw(m, n),)


def _two(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    return draw(m, n), draw(m, n)


def _row_codes(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    return draw(m, n).to(torch.float8_e4m3fn), draw.scales(m, 1)


def _dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise as `FP8Tensor` does for operators without an FP8 form; GEMMs decode in the tensor cores."""
    return dequantize(Quantized(codes, scale, PER_ROW), torch.bfloat16)


def _with_folds(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    return draw(m, n), draw.scales(1, n), draw.scales(m, 1)


def _with_vectors(count: int) -> Operands:
    return lambda draw, m, n: (draw(m, n), *(draw(n) for _ in range(count)))


def _hidden(draw: Draw, m: int, f: int) -> Sequence[Tensor]:
    """Return the gradient of h, gate and up."""
    return draw(m, f), draw(m, f), draw(m, f)


def _hidden_codes(draw: Draw, m: int, f: int) -> Sequence[Any]:
    """Return the gradient of h, and gate and up as the codes saved by forward."""
    dh, gate, up = _hidden(draw, m, f)
    return dh, *activate("silu", gate, up, BY_ROW, keeps_inputs=True).inputs


def _folded(hidden: Operands) -> Operands:
    return lambda draw, m, f: (*hidden(draw, m, f), draw.scales(m, 1), draw.scales(1, 2 * f), draw.scales(m, 1))


def _rotated(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    x = draw(1, m, n // HEAD_DIM, HEAD_DIM)
    return x, draw(m, HEAD_DIM // 2).float(), draw(m, HEAD_DIM // 2).float()


def _norm_backward(draw: Draw, m: int, n: int) -> Sequence[Tensor]:
    return draw(m, n), draw(m, n), draw(n), draw.scales(m)


def _quantize(rows: QuantSpec | None, columns: QuantSpec | None) -> Callable[..., Any]:
    return lambda x, *folds: quantize_pair([x], rows, columns, *folds)


def _quantize_weight(weight: Tensor) -> Any:
    return quantize_weights([weight], BY_ROW).stack


def _backward_folded(
    dh: Tensor, gate: Any, up: Any, hidden_scale: Tensor, row_fold: Tensor, column_fold: Tensor
) -> Any:
    targets, factors = Targets(BY_ROW, BY_ROW, BY_COLUMN), Factors(row_fold, column_fold, hidden_scale)
    return activation_backward("silu", dh, gate, up, targets, factors)


_STREAM, _HIDDEN = (TOKENS, DIM), (TOKENS, FFN)
_swiglu, _swiglu_and_inputs = partial(activate, "silu"), partial(activate, "silu", keeps_inputs=True)
_backward_tiles = partial(activation_backward, "silu", targets=Targets(BY_TILE, BY_TILE, BY_TILE))

CASES = (
    *(
        case
        for shape in (_STREAM, _HIDDEN)
        for case in (
            Case("BF16 copy", shape, _one, torch.clone),
            Case("quantize rows", shape, _one, _quantize(BY_ROW, None)),
            Case("dequantize rows", shape, _row_codes, _dequantize),
            Case("quantize columns", shape, _one, _quantize(None, BY_ROW), passes=2),
            Case("quantize folded pair", shape, _with_folds, _quantize(BY_ROW, BY_ROW), passes=2),
            Case("quantize block pair", shape, _one, _quantize(BY_TILE, BY_TILE)),
            Case("quantize tensor pair", shape, _one, _quantize(BY_TENSOR, BY_TENSOR), passes=2),
            Case("transpose", shape, lambda draw, m, n: (draw(m, n).to(torch.float8_e4m3fn),), transpose),
        )
    ),
    Case("quantize weights", (2 * FFN, DIM), lambda draw, n, k: (draw(n, k).requires_grad_(),), _quantize_weight),
    Case("SwiGLU, row codes", _HIDDEN, _two, lambda gate, up: _swiglu(gate, up, BY_ROW)),
    Case("SwiGLU, 1x128 codes", _HIDDEN, _two, lambda gate, up: _swiglu(gate, up, BY_TILE)),
    Case("SwiGLU, row codes, and its inputs", _HIDDEN, _two, lambda gate, up: _swiglu_and_inputs(gate, up, BY_ROW)),
    Case("SwiGLU, 1x128 codes, and its inputs", _HIDDEN, _two, lambda gate, up: _swiglu_and_inputs(gate, up, BY_TILE)),
    Case("SwiGLU backward, folded codes", _HIDDEN, _folded(_hidden), _backward_folded, passes=2),
    Case("SwiGLU backward, 1x128 codes", _HIDDEN, _hidden, _backward_tiles, passes=2),
    Case("SwiGLU backward of codes, folded", _HIDDEN, _folded(_hidden_codes), _backward_folded, passes=2),
    Case("SwiGLU backward of codes, 1x128", _HIDDEN, _hidden_codes, _backward_tiles, passes=2),
    Case("SwiGLU backward, plain", _HIDDEN, _hidden, partial(activation_backward_plain, "silu")),
    Case("RMS norm", _STREAM, _with_vectors(1), lambda x, weight: normalise(x, weight, None, 1e-5)),
    Case(
        "RMS norm, row codes", _STREAM, _with_vectors(1),
        lambda x, weight: normalise(x, weight, None, 1e-5, target=BY_ROW),
    ),
    Case(
        "RMS norm, rotated INT8 and row codes", _STREAM, _with_vectors(1),
        lambda x, weight: normalise(x, weight, None, 1e-5, target=ROTATED, second=BY_ROW),
    ),
    Case(
        "RMS norm backward", _STREAM, _norm_backward,
        lambda dy, x, weight, rstd: normalise_backward(dy, x, weight, None, None, rstd),
    ),
    Case(
        "layer norm, row codes", _STREAM, _with_vectors(2),
        lambda x, weight, bias: normalise(x, weight, bias, 1e-5, centred=True, target=BY_ROW),
    ),
    Case("rotary", _STREAM, _rotated, rotate),
    Case("rotary", (TOKENS, DIM // 4), _rotated, rotate),
    Case(
        "cross entropy in place", (CHUNK, VOCAB),
        lambda draw, m, v: (draw(m, v), torch.arange(m, device=draw.device) % v), cross_entropy_,
        writes=lambda logits, targets: (logits, torch.empty(len(targets), device=targets.device)),
    ),
)  # fmt: skip
"""All cases. To add a kernel, write a line here."""


def command(*, only: Names = (), device: str = "auto", repeats: int = 20, output: Output = TO_STDOUT) -> int:
    """Time each fused kernel against a copy of as many bytes, at the shapes of a Llama-8B; small ones on a CPU.

    Examples:

        octavo bench kernels
        octavo bench kernels --only quantize --only transpose
        octavo bench kernels --device cpu

    Parameters
    ----------
    only
        Prefixes of the names of the kernels to run; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Timed calls, after a warm-up; the median is reported.
    """
    names = list(dict.fromkeys(case.kernel for case in CASES))
    for start in only:
        if not any(name.startswith(start) for name in names):
            near = did_you_mean(start, names)
            raise ConfigError(f"--only: no kernel begins with '{start}'.{near} Kernels: {', '.join(names)}.")
    repeats = positive("--repeats", repeats)
    rows = bench_kernels(only, device=device_named(device), repeats=repeats)
    return output.finish(KIND, rows, device=device, only=only, repeats=repeats)
