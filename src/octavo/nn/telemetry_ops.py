"""The GEMMs of a layer that telemetry looks at: fprop and dgrad, and what they read.

A watched layer has a page, FP32 (1 + 2 n, WIDTH), where there are histograms (1 + 2 n, WIDTH + BINS): a row
(`octavo.kernels.sample`) for the input of n layers that are computed together, n for their weights, n for their
grad_outputs. Its operators give what the plain ones give, bit for bit, and write the page: fprop the input and the
weights, dgrad the rest. Both look after the product, whose first and last column tell of every NaN in an operand. They
say nothing of the page in their signatures, as `quantize_with_scale` says nothing of its cells; written twice, it is
the same.

Where an MLP is computed as one, no tensor holds the hidden activation or the gradients of gate and up: those of the
sampled rows are computed once more. So are the patches of a convolution. A weight that is an FP8 tensor is looked at as
the codes that it is, and so is an input of which there are only codes (`octavo.nn.attached_codes.placeholder`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.activation import INPUTS, activation_backward_plain
from octavo.kernels.operator import define
from octavo.kernels.patches import Window, unfold_rows, window_of
from octavo.kernels.quant_spec import parse_spec
from octavo.kernels.reference.activation import value
from octavo.kernels.sample import SampleInput, held, rests, sample, sample_soon, sampled_rows, soon
from octavo.nn.attached_codes import is_placeholder
from octavo.nn.fp8_weights import has_fp8_weight
from octavo.nn.weight_codes import WeightCodes, as_matrix, multiply
from octavo.numerics import Quantized, dequantize, granularity_named
from octavo.recipes import Operand

PATCHES = "patches"
"""What the kind of a convolution's input begins with; the numbers of its window follow."""


@dataclass(frozen=True, eq=False)
class StatsSlot:
    """Telemetry buffer of a sampled layer, held as `layer.watch`."""

    buffer: Tensor
    """Statistics of all layers that are computed together, FP32."""
    layers: int
    """Count of these layers."""


class Watched(Protocol):
    """A layer that may be watched."""

    watch: StatsSlot | None


def stats_buffer_of(layers: Sequence[Watched]) -> Tensor | None:
    """Return the page of layers that are computed together now; None where nobody looks, or some are missing.

    An evaluation is not looked at.
    """
    watch = layers[0].watch
    if watch is None or not torch.is_grad_enabled():
        return None
    together = all(layer.watch is not None and layer.watch.layers == len(layers) for layer in layers)
    return watch.buffer if together else None


class Source(NamedTuple):
    """Where an operand came from."""

    tensors: Sequence[Tensor]
    """The operand itself, in one piece or side by side. With `kind` what it is made of: an activation of gate and up,
    or of up alone; its gradient of that of the hidden activation, then gate and up, each as codes and scale if they are
    kept so; patches of images (B, H, W, C)."""
    target: QuantSpec
    """What it was quantised to."""
    tied: bool
    """Whether with scales of its own maxima: not with those that a model keeps."""
    kind: str = ""
    """The activation, as `kernels.activation` names it, or `patches_of` a window."""
    fold: Tensor | None = None
    """FP32 (1, N), what a gradient's columns were multiplied by."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor], operand: Operand, kind: str = "", fold: Tensor | None = None) -> Source:
        """Describe an operand of a recipe."""
        target = QuantSpec(operand.format, operand.granularity, operand.scaling, operand.rounding)
        return cls(tensors, target, not operand.has_stored_scale, kind, fold)


def patches_of(window: Window) -> str:
    """Return the kind of a convolution's input; none where its patches are the pixels."""
    return "" if window.is_pixel else " ".join([PATCHES, *map(str, window.flat)])


def fprop(
    x: Quantized, w: WeightCodes, weights: Sequence[Tensor], target: QuantSpec, dtype: torch.dtype, accumulate: str,
    source: Source, page: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return X W_i^T for each weight, and look at the input and the weights. target: what W is quantised to."""
    codes, scales = [matrix.codes for matrix in w.matrices], [matrix.scale for matrix in w.matrices]
    plain = [] if has_fp8_weight(weights) else list(weights)
    outputs: list[Tensor] = torch.ops.octavo.sampled_fprop(
        x.codes, x.scale, x.granularity.name, codes, scales, str(target), list(w.rows), plain, dtype,
        accumulate, list(source.tensors), str(source.target), source.tied, source.kind, page,
    )  # fmt: skip
    return outputs


def dgrad(
    g: Quantized, w_KN: Quantized, layers: int, dtype: torch.dtype, accumulate: str, source: Source, page: Tensor
) -> Tensor:
    """Return G W (M, K), and look at the gradients of that many layers."""
    result: Tensor = torch.ops.octavo.sampled_dgrad(
        g.codes, g.scale, g.granularity.name, w_KN.codes, w_KN.scale, w_KN.granularity.name, layers, dtype, accumulate,
        list(source.tensors), str(source.target), source.tied, source.kind, source.fold, page,
    )  # fmt: skip
    return result


def _fprop(
    x: Tensor, x_scale: Tensor, x_granularity: str, codes: list[Tensor], scales: list[Tensor], target: str,
    counts: list[int], weights: list[Tensor], dtype: torch.dtype, accumulate: str, tensors: list[Tensor], looked: str,
    tied: bool, kind: str, page: Tensor,
) -> list[Tensor]:  # fmt: skip
    left, goal = Quantized(x, x_scale, granularity_named(x_granularity)), _named(target)
    w = WeightCodes(tuple(Quantized(*pair, goal.tile) for pair in zip(codes, scales, strict=True)), tuple(counts))
    outputs = multiply(left, w, dtype, accumulate)
    row, *rows = page.data.unbind()  # no versions count: a layer may run twice before backward
    if not rests(row) and 0 not in x.shape:
        sample_input(x, x_scale, tensors, _named(looked), tied, kind, outputs[0], row)
        sample_weights(w, weights, goal, outputs, rows)
    return outputs


def sample_input(
    x: Tensor, scale: Tensor, tensors: list[Tensor], operand: QuantSpec, tied: bool, kind: str, y: Tensor, row: Tensor
) -> None:
    """Look at what fprop has read as codes x with a scale, and of which y came."""
    source, edges, total = tensors[0], ends_of(y), len(x)
    if kind.startswith(PATCHES):
        window = window_of([int(number) for number in kind.split()[1:]])
        source = unfold_rows(source, window, sampled_rows(total, row))
        sample_soon(SampleInput(source, scale, operand, None, edges, tied, total), row)
    elif kind:
        parts, scales, ends = _sampled(tensors, total, row), held(scale), None if edges is None else held(edges)
        soon(
            lambda: sample(SampleInput(_hidden(parts, kind), scales, operand, None, ends, tied, total), row), row.device
        )
    elif is_placeholder(source):
        sample_soon(SampleInput(x, scale, operand, None, edges, is_coded=True), row)
    else:
        source = source.flatten(0, -2) if source.dim() > 2 else source
        sample_soon(SampleInput(source, scale, operand, None, edges, tied), row)


def sample_weights(
    w: WeightCodes, weights: Sequence[Tensor], target: QuantSpec, outputs: Sequence[Tensor], rows: Sequence[Tensor]
) -> None:
    """Look at the weights of which outputs came, each in its own row. weights: none where they are FP8 tensors."""
    parts = w.parts()
    if parts is None:
        return
    alone = len(parts) == 1 or parts[0].granularity.rows is not None
    for i, (part, y, row) in enumerate(zip(parts, outputs, rows, strict=False)):
        if weights:
            sample_soon(
                SampleInput(as_matrix(weights[i].detach()), part.scale, target, None, ends_of(y.t()), alone), row
            )
        else:
            sample_soon(SampleInput(part.codes, part.scale, target, None, ends_of(y.t()), is_coded=True), row)


def _dgrad(
    g: Tensor, g_scale: Tensor, g_granularity: str, w: Tensor, w_scale: Tensor, w_granularity: str, layers: int,
    dtype: torch.dtype, accumulate: str, tensors: list[Tensor], looked: str, tied: bool, kind: str,
    fold: Tensor | None, page: Tensor,
) -> Tensor:  # fmt: skip
    left = Quantized(g, g_scale, granularity_named(g_granularity))
    result = kernels.gemm(left, Quantized(w, w_scale, granularity_named(w_granularity)), dtype, accumulate)
    rows = page.data.unbind()[1 + layers :]
    if not rests(rows[0]) and 0 not in g.shape:
        sample_gradients(len(g), g_scale, tensors, _named(looked), tied, kind, fold, result, rows)
    return result


def sample_gradients(
    total: int, g_scale: Tensor, tensors: Sequence[Tensor], operand: QuantSpec, tied: bool, kind: str,
    fold: Tensor | None, dx: Tensor, rows: Sequence[Tensor],
) -> None:  # fmt: skip
    """Look at what dgrad has read side by side, of `total` rows, and of which dx came."""
    edges = ends_of(dx)
    if not kind:
        _sample_parts(tensors, g_scale, operand, tied, fold, edges, rows, None, sample_soon)
        return
    parts, scale = _sampled(tensors, total, rows[0]), held(g_scale)
    folds, ends = (None if x is None else held(x) for x in (fold, edges))
    soon(
        lambda: _sample_parts(_gradients(parts, kind), scale, operand, tied, folds, ends, rows, total, sample),
        scale.device,
    )


def _sample_parts(
    tensors: Sequence[Tensor], g_scale: Tensor, operand: QuantSpec, tied: bool, fold: Tensor | None,
    edges: Tensor | None, rows: Sequence[Tensor], total: int | None, look: Callable[[SampleInput, Tensor], None],
) -> None:  # fmt: skip
    widths = [dy.shape[1] for dy in tensors]
    scales = _parts(g_scale.t(), operand.tile.cols, widths)
    folds = [fold] * len(widths) if fold is None or len(widths) == 1 else fold.split(widths, dim=1)
    alone = tied and (len(widths) == 1 or operand.tile.cols is not None)
    for dy, scale, part, row in zip(tensors, scales, folds, rows, strict=True):
        if scale is not None:
            look(SampleInput(dy, scale.t(), operand, part, edges, alone, total), row)


def _parts(scale: Tensor, height: int | None, counts: list[int]) -> list[Tensor | None]:
    """Return the scales of each part of a matrix that is cut by rows; None where a tile straddles a cut.

    Args:
        scale: of tiles of that height, None for one of all rows.
        counts: rows of the parts.
    """
    if len(counts) == 1 or height is None:
        return [scale] * len(counts)
    if any(count % height for count in counts[:-1]):
        return [None] * len(counts)
    return list(scale.split([-(-count // height) for count in counts]))


def ends_of(y: Tensor) -> Tensor | None:
    """Return the first and the last column of y (R, C) as a view (R, 2)."""
    step = max(y.shape[1] - 1, 1)
    return y[:, ::step] if y.shape[1] > 1 else y.expand(-1, 2) if y.shape[1] else None


def _sampled(tensors: Sequence[Tensor], total: int, row: Tensor) -> list[Tensor]:
    """Return copies of the sampled rows of each."""
    rows = sampled_rows(total, row)
    return [_rows_of(tensor, rows) for tensor in tensors]


def _hidden(before: Sequence[Tensor], kind: str) -> Tensor:
    """Return rows of f(gate) * up, FP32."""
    gate, *up = (tensor.float() for tensor in before)
    h = value(kind, gate)
    return h * up[0] if up else h


def _gradients(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return rows of the gradients of gate and up, or of up alone."""
    dh, *inputs = tensors
    if inputs[0].element_size() == 1:
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        inputs = [dequantize(Quantized(codes, scale, INPUTS.tile)).to(dh.dtype) for codes, scale in pairs]
    d_gate, d_up = activation_backward_plain(kind, dh, inputs[0], inputs[1] if len(inputs) > 1 else None)
    return [d_gate] if d_up is None else [d_gate, d_up]


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def _named(text: str) -> QuantSpec:
    target = parse_spec(text)
    assert target is not None
    return target


define(
    "sampled_fprop(Tensor x, Tensor x_scale, str x_granularity, Tensor[] codes, Tensor[] scales, str target, "
    "int[] counts, Tensor[] weights, ScalarType dtype, str accumulate, Tensor[] tensors, str looked, bool tied, "
    "str kind, Tensor page) -> Tensor[]",
    _fprop,
    lambda x, x_scale, x_granularity, codes, scales, target, counts, weights, dtype, *_: [
        x.new_empty(x.shape[0], count, dtype=dtype) for count in counts
    ],
    torch.Tag.cudagraph_unsafe,
)
define(
    "sampled_dgrad(Tensor g, Tensor g_scale, str g_granularity, Tensor w, Tensor w_scale, str w_granularity, "
    "int layers, ScalarType dtype, str accumulate, Tensor[] tensors, str looked, bool tied, str kind, Tensor? fold, "
    "Tensor page) -> Tensor",
    _dgrad,
    lambda g, g_scale, g_granularity, w, w_scale, w_granularity, layers, dtype, *_: g.new_empty(
        g.shape[0], w.shape[0], dtype=dtype
    ),
    torch.Tag.cudagraph_unsafe,
)
