"""Sampled GEMMs: fprop and dgrad of a layer with telemetry, and statistics of their operands.

Layers that are computed together share a buffer, FP32 (1 + 2 n, WIDTH), or (1 + 2 n, WIDTH + BINS) with histograms: one
row (`octavo.kernels.sample`) for the input of n layers, n for their weights, n for their grad_outputs. The operators
return the results of the plain ones, bit for bit, and write the buffer: fprop the rows of input and weights, dgrad the
others. Both sample after the GEMM, since the first and last column of its result show every NaN in an operand. Their
schemas do not declare this mutation, like that of `quantize_with_scale`: writing a row twice is the same as writing it
once.

In a fused MLP no tensor holds the hidden activation or the gradients of gate and up: their sampled rows are recomputed,
as are the patches of a convolution. Of a weight that is an FP8 tensor the codes are sampled, and of an input that
exists as codes only (`octavo.nn.attached_codes.placeholder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import QuantSpec
from octavo.kernels.activation import INPUTS, activation_backward_plain
from octavo.kernels.activation.reference import value
from octavo.kernels.patches import unfold_rows
from octavo.kernels.patches.window import Window
from octavo.kernels.quant_spec import spec_of
from octavo.kernels.runtime.operation import operation
from octavo.kernels.sample import SampleInput, is_idle, sample, sampled_rows, sampling_off
from octavo.nn.attached_codes import is_placeholder
from octavo.nn.first_call import note_calls
from octavo.nn.weight_codes import WeightCodes, as_matrix, multiply, split_scale
from octavo.numerics import Quantized, block_for, dequantize, rotate
from octavo.recipes import Operand

PATCHES = "patches"
"""Prefix of `Source.kind` for the input of a convolution; the numbers of its window follow."""
ROWS = "rows"
"""`Source.kind` of rows of the first tensor, by their indices in the second, int32 (T,)."""


@dataclass(frozen=True, eq=False)
class StatsSlot:
    """Telemetry buffer of a layer, as `layer.stats_slot`."""

    buffer: Tensor
    """Statistics of all layers that are computed together, FP32."""
    layers: int
    """Number of these layers."""
    alone: Tensor
    """Statistics of this layer when it is computed by itself, FP32 of three rows; the same buffer if it always is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies and files of a layer are not measured


class SampledLayer(Protocol):
    """A layer that may have telemetry."""

    stats_slot: StatsSlot | None


def stats_buffer_of(layers: Sequence[SampledLayer]) -> Tensor | None:
    """Return the buffer of layers that are computed together; None without telemetry, or without gradients.

    In eager mode also None in steps that are not measured: they launch, and record, the same kernels as without
    telemetry. Compiled code calls the sampling operators in every step; they check for themselves.
    """
    note_calls(layers)
    slot = layers[0].stats_slot
    which = "" if slot is None else which_buffer(layers)
    if slot is None or not which or (not torch.compiler.is_compiling() and is_idle(slot.buffer)):
        return None
    return slot.alone if which == "alone" else slot.buffer


def which_buffer(layers: Sequence[SampledLayer]) -> str:
    """Return the field of the first layer's `stats_slot` with the buffer of layers that are computed together.

    Empty without telemetry, or without gradients.
    """
    if layers[0].stats_slot is None or not torch.is_grad_enabled():
        return ""
    if len(layers) == 1:  # of a group, too: by itself while a hook of its own, or of another layer, must run
        return "alone"
    together = all(layer.stats_slot is not None and layer.stats_slot.layers == len(layers) for layer in layers)
    return "buffer" if together else ""


class GemmOptions(NamedTuple):
    """Options of a GEMM, as `octavo.kernels.gemm` takes them."""

    dtype: torch.dtype
    accumulate: str


class Source(NamedTuple):
    """Origin of an operand."""

    tensors: Sequence[Tensor]
    """The operand, in one piece or side by side. With `kind` the tensors that it is computed from: for an activation
    gate and up, or up alone; for its gradient that of the hidden activation, then gate and up, each as codes and scale
    if they are saved so; for patches images (B, H, W, C); for `ROWS` rows of values, or of the operand's own codes."""
    target: QuantSpec
    """Its quantisation."""
    tied: bool
    """Whether its scales are those of its own maxima, not stored ones."""
    kind: str = ""
    """Activation, by its name in `kernels.activation`, or `patches_of` a window, or `ROWS`."""
    fold: Tensor | None = None
    """FP32 (1, N), factors of a gradient's columns."""

    @property
    def is_coded(self) -> bool:
        """Whether its rows exist as codes only, as on the rank of an expert that they were sent to."""
        return self.kind == ROWS and self.tensors[0].element_size() == 1

    @classmethod
    def of(cls, tensors: Sequence[Tensor], operand: Operand, kind: str = "", fold: Tensor | None = None) -> Source:
        """Describe an operand of a recipe."""
        return cls(tensors, spec_of(operand), not operand.has_stored_scale, kind, fold)


def patches_of(window: Window) -> str:
    """Return the kind of a convolution's input; empty if its patches are the pixels."""
    return "" if window.is_pixel else " ".join([PATCHES, *map(str, window.flat)])


def _fprop_fake(
    x: Quantized, w: WeightCodes, target: QuantSpec, weights: Sequence[Tensor], options: GemmOptions, *_: object
) -> list[Tensor]:
    return [x.codes.new_empty(x.codes.shape[0], rows, dtype=options.dtype) for rows in w.rows]


@operation(fake=_fprop_fake, tags=[torch.Tag.cudagraph_unsafe])
def sampled_fprop(
    x: Quantized, w: WeightCodes, target: QuantSpec, weights: Sequence[Tensor], options: GemmOptions, source: Source,
    stats: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return X W_i^T for each weight, and sample the input and the weights.

    Args:
        target: quantisation of W.
        weights: (N_i, K); empty if they are FP8 tensors, of which the codes are sampled.
    """
    outputs = multiply(x, w, *options)
    row, *rows = stats.data.unbind()  # without incrementing its version: a layer may run twice before backward
    if not sampling_off(row) and 0 not in x.codes.shape:
        sample_input(x, source, outputs[0], row)
        sample_weights(w, weights, target, outputs, rows)
    return outputs


def sample_input(x: Quantized, source: Source, y: Tensor, row: Tensor) -> None:
    """Sample the operand x of an fprop with the result y."""
    tensor, edges, total = source.tensors[0], ends_of(y), len(x.codes)
    if source.kind or source.target.rotation:
        values = sampled_values(source, total, row)
        sample(SampleInput(values, x.scale, source.target, None, edges, source.tied, total, source.is_coded), row)
    elif is_placeholder(tensor):
        sample(SampleInput(x.codes, x.scale, source.target, None, edges, is_coded=True), row)
    else:
        tensor = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        sample(SampleInput(tensor, x.scale, source.target, None, edges, source.tied), row)


def sampled_values(source: Source, total: int, row: Tensor) -> Tensor:
    """Return the sampled rows, of `total`, of an operand that no tensor holds, or of a rotated one."""
    rows = sampled_rows(total, row)
    if source.kind.startswith(PATCHES):
        window = Window.of([int(number) for number in source.kind.split()[1:]])
        return unfold_rows(source.tensors[0], window, rows)
    if source.kind == ROWS:
        x, places = source.tensors
        values = _rows_of(x, places[rows])
        return values if source.is_coded else rotated(values, source.target)
    tensors = [_rows_of(tensor, rows) for tensor in source.tensors]
    return rotated(hidden(tensors, source.kind) if source.kind else tensors[0].flatten(0, -2), source.target)


def rotated(rows: Tensor, target: QuantSpec) -> Tensor:
    """Return rows as they are before rounding to a target: rotated, if it has a rotation."""
    return rotate(rows, block_for(rows.shape[1], target.rotation)) if target.rotation else rows


def sample_weights(
    w: WeightCodes, weights: Sequence[Tensor], target: QuantSpec, outputs: Sequence[Tensor], rows: Sequence[Tensor]
) -> None:
    """Sample the weights of these outputs, each into its own row. weights: empty if they are FP8 tensors."""
    parts = w.parts()
    if parts is None:
        return
    alone = len(parts) == 1 or parts[0].granularity.rows is not None
    for i, (part, y, row) in enumerate(zip(parts, outputs, rows, strict=False)):
        edges = ends_of(y.t())
        if weights and target.rotation:
            matrix = as_matrix(weights[i].detach())
            values = rotated(_rows_of(matrix, sampled_rows(len(matrix), row)), target)
            sample(SampleInput(values, part.scale, target, None, edges, alone, len(matrix)), row)
        elif weights:
            sample(SampleInput(as_matrix(weights[i].detach()), part.scale, target, None, edges, alone), row)
        else:
            sample(SampleInput(part.codes, part.scale, target, None, edges, is_coded=True), row)


def _dgrad_fake(g: Quantized, w: Quantized, _layers: int, options: GemmOptions, *_: object) -> Tensor:
    return g.codes.new_empty(g.codes.shape[0], w.codes.shape[0], dtype=options.dtype)


@operation(fake=_dgrad_fake, tags=[torch.Tag.cudagraph_unsafe])
def sampled_dgrad(
    g: Quantized, w: Quantized, layers: int, options: GemmOptions, source: Source, stats: Tensor
) -> Tensor:
    """Return G W (M, K), and sample the gradients of that many layers. w: transposed, (K, N)."""
    result = kernels.gemm(g, w, *options)
    rows = stats.data.unbind()[1 + layers :]
    if not sampling_off(rows[0]) and 0 not in g.codes.shape:
        sample_gradients(g, source, result, rows)
    return result


def sample_gradients(g: Quantized, source: Source, dx: Tensor, rows: Sequence[Tensor]) -> None:
    """Sample the gradients that dgrad read side by side as g, with the result dx, a row for each layer."""
    tensors, operand, tied, kind, fold = source
    total = len(g.codes) if kind else None
    if kind:
        tensors = gradients(sampled(tensors, len(g.codes), rows[0]), kind)
    widths = [dy.shape[1] for dy in tensors]
    scales = split_scale(g.scale.t(), operand.tile.cols, widths)
    if scales is None:
        return
    folds = [fold] * len(widths) if fold is None or len(widths) == 1 else fold.split(widths, dim=1)
    alone = tied and (len(widths) == 1 or operand.tile.cols is not None)
    for dy, scale, part, row in zip(tensors, scales, folds, rows, strict=True):
        sample(SampleInput(dy, scale.t(), operand, part, ends_of(dx), alone, total), row)


def ends_of(y: Tensor) -> Tensor | None:
    """Return the first and the last column of y (R, C) as a view (R, 2)."""
    step = max(y.shape[1] - 1, 1)
    return y[:, ::step] if y.shape[1] > 1 else y.expand(-1, 2) if y.shape[1] else None


def sampled(tensors: Sequence[Tensor], total: int, row: Tensor) -> list[Tensor]:
    """Return copies of the sampled rows of each."""
    rows = sampled_rows(total, row)
    return [_rows_of(tensor, rows) for tensor in tensors]


def hidden(before: Sequence[Tensor], kind: str) -> Tensor:
    """Return rows of f(gate) * up, FP32."""
    gate, *up = (tensor.float() for tensor in before)
    h = value(kind, gate)
    return h * up[0] if up else h


def gradients(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """Return rows of the gradients of gate and up, or of up alone."""
    dh, *inputs = tensors
    if inputs[0].element_size() == 1:
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        inputs = [dequantize(Quantized(codes, scale, INPUTS.tile)).to(dh.dtype) for codes, scale in pairs]
    d_gate, d_up = activation_backward_plain(kind, dh, inputs[0], inputs[1] if len(inputs) > 1 else None)
    return [d_gate] if d_up is None else [d_gate, d_up]


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]
