"""Activations of an MLP, quantised as they are computed; see `octavo.kernels.activation`.

As in `quantize`, a first pass finds the maxima that no single program sees, and a second one writes, in reverse order,
since the last reads of the first are still cached. Both use the same functions, without FMA contraction: so the maxima
are exactly those of the values written, and the backward recomputes the forward's h bit for bit.
"""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.quant_spec import QuantSpec, contiguous_rows, empty_scale
from octavo.kernels.quantize import triton as quantize
from octavo.kernels.triton.cast import rounded_product, to_dtype
from octavo.kernels.triton.codes import (
    INTERPRETED,
    NONE,
    POWER_OF_TWO,
    ROW,
    ROW_TILE,
    SIDE,
    amax,
    emit,
    emit_both,
    emit_row,
    emit_second_scale,
    end_search,
    factors,
    finite_magnitude,
    inside,
    load_tile,
    quads,
    rotate,
    scale_of,
    search,
    to_codes,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.output import Output, begin_searches, end_searches
from octavo.kernels.triton.shape import Shape, next_power_of_2, row_warps
from octavo.numerics import Quantized, block_for

# Tuned on an H200. `TILED`: for scales of 128-element tiles.
LONGEST_ROW = 16384
"""Longest row, in elements, that one program holds."""
FORWARD_SEARCH = Shape(4, 1024, warps=4, steps=32, stages=3)
FORWARD_WRITE = Shape(64, 128, warps=4)
FORWARD_TILED = Shape(64, SIDE.value, warps=4)
BACKWARD_SEARCH = Shape(2, 1024, warps=4, steps=64, stages=3)
BACKWARD_WRITE = Shape(64, 64, warps=8)
BACKWARD_TILED = Shape(32, SIDE.value, warps=8, registers=64)
PLAIN = Shape(8, 512, warps=4)


def unsupported_reason(
    width: int,
    is_gated: bool,
    *,
    rows: QuantSpec | None = None,
    columns: QuantSpec | None = None,
    hidden: QuantSpec | None = None,
) -> str | None:
    """Return why these kernels cannot produce the targets at this hidden width, or None."""
    if reason := quantize.unsupported_reason(rows, columns, hidden, cols=width):
        return reason
    tiles = (rows.tile if rows else None, columns.tile.transposed if columns else None)
    if is_gated and width % SIDE.value and any(tile is not None and tile.cols == SIDE.value for tile in tiles):
        return f"tiles of {SIDE.value} columns straddle [d gate | d up] at hidden width {width}"
    return None


def limits_registers(*targets: QuantSpec | None) -> bool:
    """Return whether kernels for these targets limit registers (`maxnreg`), which tracing compilers drop."""
    return any(target is not None and SIDE.value in (target.tile.rows, target.tile.cols) for target in targets)


def activate(
    kind: str,
    gate: Tensor,
    up: Tensor | None,
    target: QuantSpec,
    inputs: QuantSpec | None = None,
    second: QuantSpec | None = None,
) -> list[Quantized | Tensor | None]:
    """See `octavo.kernels.activation.activate`: h, gate and up if there are `inputs`, and the scales of `second`."""
    gate, up = contiguous_rows(gate), up if up is None else contiguous_rows(up)
    rows, cols = gate.shape
    output = Output(target, rows, cols, gate.device)
    kept = [Output(None if x is None else inputs, rows, cols, gate.device) for x in (gate, up)]
    scale = None if second is None else empty_scale(second, rows, cols, gate.device)
    made = [*(each.quantized for each in (output, *kept) if each.quantized is not None), scale]
    kept_memory = *kept[0].arguments[:2], *kept[1].arguments[:2]
    sources = gate, up, gate.stride(0), 0 if up is None else up.stride(0)
    longest = quantize.LONGEST_WHOLE if target.needs_whole_rows else LONGEST_ROW
    if target.granularity == "row" and cols <= longest:
        size = max(next_power_of_2(cols), SIDE.value)
        _forward_rows_kernel[(rows,)](
            *sources, *output.arguments[:2], scale, *kept_memory, rows, cols, **quantize.second_scaling(second),
            KIND=kind, SCALING=output.scaling, ROTATION=block_for(cols, target.rotation), SIZE=size,
            num_warps=row_warps(size, target.rotation != 0), enable_fp_fusion=False,
        )  # fmt: skip
        return made
    if output.searches:
        shape = FORWARD_SEARCH
        _forward_search_kernel[shape.grid(rows, cols)](
            *sources, rows, cols, *output.arguments[2:], KIND=kind, MODE=output.mode, **shape.strip(rows, cols)
        )
    shape = FORWARD_TILED if output.is_tiled or inputs is not None else FORWARD_WRITE
    across, down = shape.grid(rows, cols)
    _forward_write_kernel[(across * down,)](
        *sources, rows, cols, *output.arguments, *kept_memory,
        KIND=kind, MODE=output.mode, SCALING=output.scaling, **shape.meta(),
    )  # fmt: skip
    return made


def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    targets: Sequence[QuantSpec | None],
    factors: Sequence[Tensor | None],
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """See `octavo.kernels.activation.activation_backward`."""
    (rows, columns, hidden), (row_fold, column_fold, hidden_scale) = targets, factors
    m, f = dh.shape
    n = f if up is None else 2 * f
    row = Output(rows, m, n, dh.device)
    column = Output(columns, m, n, dh.device, transposed=True)
    h_t = Output(hidden, m, f, dh.device, transposed=True, scale=hidden_scale)
    outputs = row, column, h_t
    folds = (None if fold is None else fold.contiguous() for fold in (row_fold, column_fold))
    sources = *sources_of(dh, gate, up), m, f, *folds
    if any(output.searches for output in outputs):
        begin_searches(*outputs)
        shape = BACKWARD_SEARCH
        modes = [output.searched for output in outputs]
        _backward_search_kernel[shape.grid(m, f)](
            *sources, *row.arguments[2:], *column.arguments[2:], *h_t.arguments[2:],
            KIND=kind, ROW_MODE=modes[0], COLUMN_MODE=modes[1], HIDDEN_MODE=modes[2], **shape.strip(m, f),
        )  # fmt: skip
        end_searches(*outputs)
    if any(output.mode != NONE.value for output in outputs):
        shape = BACKWARD_TILED if any(output.is_tiled for output in outputs) else BACKWARD_WRITE
        across, down = shape.grid(m, f)
        _backward_write_kernel[(across * down,)](
            *sources, *row.arguments, *column.arguments, *h_t.arguments,
            KIND=kind, ROW_MODE=row.mode, ROW_SCALING=row.scaling,
            COLUMN_MODE=column.mode, COLUMN_SCALING=column.scaling,
            HIDDEN_MODE=h_t.mode, HIDDEN_SCALING=h_t.scaling,
            **shape.strip(m, f),
        )  # fmt: skip
    return row.quantized, column.quantized, h_t.quantized


def activate_plain(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """See `octavo.kernels.activation.activate_plain`."""
    gate, up, (m, f) = contiguous_rows(gate), None if up is None else contiguous_rows(up), gate.shape
    h = gate.new_empty(m, f)
    across, down = PLAIN.grid(m, f)
    strides = gate.stride(0), 0 if up is None else up.stride(0)
    _forward_plain_kernel[(across * down,)](gate, up, *strides, m, f, h, KIND=kind, **PLAIN.meta())
    return h


def activation_backward_plain(kind: str, dh: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """See `octavo.kernels.activation.activation_backward_plain`."""
    m, f = gate.shape
    d_gate = torch.empty(m, f, dtype=dh.dtype, device=dh.device)
    d_up = None if up is None else torch.empty_like(d_gate)
    across, down = PLAIN.grid(m, f)
    _backward_plain_kernel[(across * down,)](*sources_of(dh, gate, up), m, f, d_gate, d_up, KIND=kind, **PLAIN.meta())
    return d_gate, d_up


def sources_of(dh: Tensor, gate: Tensor | Quantized, up: Tensor | Quantized | None) -> tuple[Any, ...]:
    """Return the inputs of the backward kernels: dh, gate and up, their row strides, the scales of gate and up."""
    scales = [x.scale if isinstance(x, Quantized) else None for x in (gate, up)]
    matrices = [x.codes if isinstance(x, Quantized) else x for x in (dh, gate, up)]
    matrices = [None if x is None else contiguous_rows(x) for x in matrices]
    return *matrices, *(0 if x is None else x.stride(0) for x in matrices), *scales


@triton.jit
def _exp(x):
    """exp in two instructions; subnormal results flush to 0."""
    if INTERPRETED:
        return tl.exp(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without a division's handling of subnormal results."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + _exp(-x)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """f(x) and f'(x) of FP32 values, operation by operation as in `reference.py`."""
    if KIND == "silu":
        share = _sigmoid(x)
        value = x * share
        slope = share + rounded_product(value, 1.0 - share)
    elif KIND == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + rounded_product(x, _exp(-0.5 * x * x) * 0.3989422804014327)
    elif KIND == "gelu_tanh":
        share = _sigmoid(1.5957691216057308 * x * (1.0 + rounded_product(0.044715 * x, x)))
        value = x * share
        slope = share + rounded_product(
            value * (1.0 - share), 1.5957691216057308 * (1.0 + rounded_product(0.134145 * x, x))
        )
    else:
        tl.static_assert(KIND == "relu2")
        positive = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def _hidden(gate_ptr, up_ptr, gate_stride, up_stride, rows, cols, in_rows, in_cols, KIND: tl.constexpr):
    """Tiles of h, gate and up; without up, gate is returned twice."""
    gate = load_tile(gate_ptr, gate_stride, rows, cols, in_rows, in_cols)
    h, _ = value_and_slope(gate, KIND)
    up = gate
    if up_ptr is not None:
        up = load_tile(up_ptr, up_stride, rows, cols, in_rows, in_cols)
        h = h * up
    return h, gate, up


@triton.jit
def tiles_of(tile_c, total_c, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Indices and mask of the scales, one per 128 columns, of a tile of WIDTH columns."""
    tiles = tile_c * WIDTH // SIDE + tl.arange(0, (WIDTH + SIDE - 1) // SIDE)
    return tiles, inside(tiles * SIDE, total_c, EVEN)


@triton.jit
def _load_values(x_ptr, scale_ptr, stride, total_r, rows, cols, in_rows, in_cols, tiles):
    """Load a tile in FP32; codes are dequantised by one scale per 128 columns of a row, stored column-major."""
    x = load_tile(x_ptr, stride, rows, cols, in_rows, in_cols)
    if scale_ptr is not None:
        if INTERPRETED:  # it decodes the codes of NaN as 480
            x = tl.where(tl.abs(x) > 448.0, float("nan"), x)
        scale_ptrs = scale_ptr + tiles[0][None, :].to(tl.int64) * total_r + rows[:, None]
        scale = tl.load(scale_ptrs, mask=in_rows[:, None] & tiles[1][None, :], other=0.0)
        if x.shape[1] > SIDE:
            by_tile = tl.reshape(x, (x.shape[0], x.shape[1] // SIDE, SIDE))
            x = tl.reshape(by_tile * scale[:, :, None], x.shape)
        else:
            x = x * scale
    return x


@triton.jit
def gradients(sources, rows, cols, in_rows, in_cols, tiles, KIND: tl.constexpr):
    """Tiles of d gate, d up and h; without up, d gate is returned twice.

    sources: the result of `sources_of`, the number of rows, and the factors of each row's gradients or None.
    """
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, weight_ptr = sources
    dh = load_tile(dh_ptr, dh_stride, rows, cols, in_rows, in_cols)
    gate = _load_values(gate_ptr, gate_scale, gate_stride, total_r, rows, cols, in_rows, in_cols, tiles)
    h, slope = value_and_slope(gate, KIND)
    if up_ptr is not None:
        up = _load_values(up_ptr, up_scale, up_stride, total_r, rows, cols, in_rows, in_cols, tiles)
        d_gate = dh * up * slope
        d_up = dh * h
        h = h * up
    else:
        d_gate = dh * slope
        d_up = d_gate
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + rows, mask=in_rows, other=0.0)[:, None]
        d_gate, d_up = d_gate * weight, d_up * weight
    return d_gate, d_up, h


@triton.jit
def gradients_of_quads(sources, rows, cols, in_rows, in_cols, tiles, KIND: tl.constexpr):
    """`gradients` of four quarters: tuples of d gate, d up and h."""
    d_gate, d_up, h = (), (), ()
    for i in tl.static_range(4):
        gate_i, up_i, h_i = gradients(sources, rows[i], cols, in_rows[i], in_cols, tiles, KIND)
        d_gate += (gate_i,)
        d_up += (up_i,)
        h += (h_i,)
    return d_gate, d_up, h


@triton.jit
def _last_first(total_c, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Strip and columns of this program, in reverse launch order: (strip, tile_c, cols, in_cols)."""
    across = tl.cdiv(total_c, WIDTH)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    strip, tile_c = number // across, number % across
    cols = tile_c * WIDTH + tl.arange(0, WIDTH)
    return strip, tile_c, cols, inside(cols, total_c, EVEN)


@Kernel
@triton.jit
def _forward_rows_kernel(
    gate_ptr, up_ptr, gate_stride, up_stride, codes_ptr, scale_ptr, second_scale,
    gate_codes, gate_scale, up_codes, up_scale, total_r, total_c, SECOND: tl.constexpr, E4M3: tl.constexpr,
    KIND: tl.constexpr, SCALING: tl.constexpr, ROTATION: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One whole row per program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    mask = cols < total_c
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if gate_codes is not None:
        _store_input_row(gate, gate_codes, gate_scale, row, total_r, total_c, SIZE)
    h, _ = value_and_slope(gate, KIND)
    if up_ptr is not None:
        up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if up_codes is not None:
            _store_input_row(up, up_codes, up_scale, row, total_r, total_c, SIZE)
        h = h * up
    emit_second_scale(h, second_scale, row, SECOND, E4M3)
    emit_row(rotate(h, ROTATION), codes_ptr, scale_ptr, row, total_c, cols, mask, SCALING)


@triton.jit
def _store_input_row(x, codes_ptr, scale_ptr, row, total_r, total_c, SIZE: tl.constexpr):
    """Quantise and store a row of an input, one scale per 128 columns, column-major. x: FP32, 0 outside the row."""
    FORMAT: tl.constexpr = codes_ptr.dtype.element_ty
    TILES: tl.constexpr = SIZE // SIDE
    tiles = tl.reshape(x, (TILES, SIDE))
    scale, inverse = scale_of(amax(tiles, 1), FORMAT, POWER_OF_TWO)
    index = tl.arange(0, TILES)
    tl.store(scale_ptr + index.to(tl.int64) * total_r + row, scale, mask=index * SIDE < total_c)
    cols = tl.arange(0, SIZE)
    codes = to_codes(tl.reshape(tiles * inverse[:, None], (SIZE,)), FORMAT)
    tl.store(codes_ptr + row * total_c + cols, codes, mask=cols < total_c)


@Kernel
@triton.jit
def _forward_search_kernel(
    gate_ptr, up_ptr, gate_stride, up_stride, total_r, total_c, stride_r, stride_c, amax_ptr,
    KIND: tl.constexpr, MODE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Maxima of h over STEPS vertically adjacent tiles."""
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(cols, total_c, EVEN)
    first = tl.program_id(1) * HEIGHT * STEPS
    running = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        rows = first + step * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = inside(rows, total_r, EVEN)
        h, _, _ = _hidden(gate_ptr, up_ptr, gate_stride, up_stride, rows, cols, in_rows, in_cols, KIND)
        running = search(finite_magnitude(h), running, amax_ptr, rows, in_rows, MODE)
    end_search(running, amax_ptr, stride_r, stride_c, tl.program_id(1), cols, in_cols, MODE)


@Kernel
@triton.jit
def _forward_write_kernel(
    gate_ptr, up_ptr, gate_stride, up_stride, total_r, total_c, codes, scale, stride_r, stride_c, inverse,
    gate_codes, gate_scale, up_codes, up_scale,
    KIND: tl.constexpr, MODE: tl.constexpr, SCALING: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of one tile of h, and of gate and up if requested, which needs WIDTH 128."""
    tile_r, tile_c, cols, in_cols = _last_first(total_c, WIDTH, False)
    rows, in_rows = quads(tile_r, total_r, HEIGHT, False)
    h, gate, up = (), (), ()
    for i in tl.static_range(4):
        h_i, gate_i, up_i = _hidden(gate_ptr, up_ptr, gate_stride, up_stride, rows[i], cols, in_rows[i], in_cols, KIND)
        h += (h_i,)
        gate += (gate_i,)
        up += (up_i,)
    size, at = (total_r, total_c), (rows, cols, in_rows, in_cols, tile_r, tile_c)
    if gate_codes is not None:
        emit(gate, (gate_codes, gate_scale, 1, total_r, None), size, at, ROW_TILE, POWER_OF_TWO, TRANSPOSED=False)
    if up_codes is not None:
        emit(up, (up_codes, up_scale, 1, total_r, None), size, at, ROW_TILE, POWER_OF_TWO, TRANSPOSED=False)
    out = codes, scale, stride_r, stride_c, inverse
    emit(h, out, size, at, MODE, SCALING, TRANSPOSED=False, FROM_AMAX=True)


@triton.jit
def _search_halves(
    gate, up, gate_running, up_running, amax_ptr, rows, in_rows, MODE: tl.constexpr, GATED: tl.constexpr
):
    """`codes.search` in [d gate | d up]: the halves share rows, not columns."""
    gate = finite_magnitude(gate)
    if GATED:
        up = finite_magnitude(up)
        if MODE == ROW:
            gate = tl.maximum(gate, up)
        else:
            up_running = search(up, up_running, amax_ptr, rows, in_rows, MODE)
    return search(gate, gate_running, amax_ptr, rows, in_rows, MODE), up_running


@triton.jit
def _end_search_halves(
    gate_running, up_running, amax_ptr, stride_r, stride_c, cols, in_cols, half, MODE: tl.constexpr, GATED: tl.constexpr
):
    strip = tl.program_id(1)
    end_search(gate_running, amax_ptr, stride_r, stride_c, strip, cols, in_cols, MODE)
    if GATED:
        end_search(up_running, amax_ptr, stride_r, stride_c, strip, cols + half, in_cols, MODE)


@Kernel
@triton.jit
def _backward_search_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, half,
    row_fold, column_fold,
    row_stride_r, row_stride_c, row_amax, column_stride_r, column_stride_c, column_amax,
    hidden_stride_r, hidden_stride_c, hidden_amax,
    KIND: tl.constexpr, ROW_MODE: tl.constexpr, COLUMN_MODE: tl.constexpr, HIDDEN_MODE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Maxima of D and h over STEPS vertically adjacent tiles. half: columns of d gate."""
    GATED: tl.constexpr = up_ptr is not None
    sources = dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, None
    cols = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    in_cols = inside(cols, half, EVEN)
    tiles = tiles_of(tl.program_id(0), half, WIDTH, EVEN)
    first = tl.program_id(1) * HEIGHT * STEPS
    gate_factors = factors(row_fold, cols, in_cols)[None, :]
    up_factors = gate_factors
    if GATED:
        up_factors = factors(row_fold, cols + half, in_cols)[None, :]
    row_gate = tl.zeros((HEIGHT, WIDTH), tl.float32)
    row_up, column_gate, column_up, running = row_gate, row_gate, row_gate, row_gate
    for step in tl.range(STEPS, num_stages=STAGES):
        rows = first + step * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = inside(rows, total_r, EVEN)
        d_gate, d_up, h = gradients(sources, rows, cols, in_rows, in_cols, tiles, KIND)
        if ROW_MODE != NONE:
            row_gate, row_up = _search_halves(
                d_gate * gate_factors, d_up * up_factors, row_gate, row_up, row_amax, rows, in_rows, ROW_MODE, GATED
            )
        if COLUMN_MODE != NONE:
            f = factors(column_fold, rows, in_rows)[:, None]
            column_gate, column_up = _search_halves(
                d_gate * f, d_up * f, column_gate, column_up, column_amax, rows, in_rows, COLUMN_MODE, GATED
            )
        if HIDDEN_MODE != NONE:
            running = search(finite_magnitude(h), running, hidden_amax, rows, in_rows, HIDDEN_MODE)
    if ROW_MODE != NONE:
        _end_search_halves(row_gate, row_up, row_amax, row_stride_r, row_stride_c, cols, in_cols, half, ROW_MODE, GATED)
    if COLUMN_MODE != NONE:
        _end_search_halves(
            column_gate, column_up, column_amax, column_stride_r, column_stride_c, cols, in_cols, half,
            COLUMN_MODE, GATED,
        )  # fmt: skip
    if HIDDEN_MODE != NONE:
        end_search(running, hidden_amax, hidden_stride_r, hidden_stride_c, tl.program_id(1), cols, in_cols, HIDDEN_MODE)


@Kernel
@triton.jit
def _backward_write_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, half,
    row_fold, column_fold,
    row_codes, row_scale, row_stride_r, row_stride_c, row_inverse,
    column_codes, column_scale, column_stride_r, column_stride_c, column_inverse,
    hidden_codes, hidden_scale, hidden_stride_r, hidden_stride_c, hidden_inverse,
    KIND: tl.constexpr, ROW_MODE: tl.constexpr, ROW_SCALING: tl.constexpr,
    COLUMN_MODE: tl.constexpr, COLUMN_SCALING: tl.constexpr,
    HIDDEN_MODE: tl.constexpr, HIDDEN_SCALING: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Codes of STEPS vertically adjacent tiles of dh, gate and up: up to five output tiles each.

    half: columns of d gate.
    """
    strip, tile_c, cols, in_cols = _last_first(half, WIDTH, EVEN)
    tiles = tiles_of(tile_c, half, WIDTH, EVEN)
    sources = dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, None
    row_out = row_codes, row_scale, row_stride_r, row_stride_c, row_inverse
    column_out = column_codes, column_scale, column_stride_r, column_stride_c, column_inverse
    hidden_out = hidden_codes, hidden_scale, hidden_stride_r, hidden_stride_c, hidden_inverse
    PARTS: tl.constexpr = 1 if up_ptr is None else 2
    for step in tl.range(STEPS, num_stages=STAGES):
        tile_r = strip * STEPS + step
        rows, in_rows = quads(tile_r, total_r, HEIGHT, EVEN)
        d_gate, d_up, h = gradients_of_quads(sources, rows, cols, in_rows, in_cols, tiles, KIND)
        parts = d_gate, d_up
        for part in tl.static_range(PARTS):
            place = cols + part * half
            at = rows, place, in_rows, in_cols, tile_r, tile_c + part * (half // WIDTH)
            emit_both(
                parts[part], factors(row_fold, place, in_cols)[None, :], column_fold, row_out, column_out,
                (total_r, PARTS * half), at, ROW_MODE, ROW_SCALING, COLUMN_MODE, COLUMN_SCALING,
            )  # fmt: skip
        if HIDDEN_MODE != NONE:
            at = rows, cols, in_rows, in_cols, tile_r, tile_c
            emit(h, hidden_out, (total_r, half), at, HIDDEN_MODE, HIDDEN_SCALING, TRANSPOSED=True)


@Kernel
@triton.jit
def _forward_plain_kernel(
    gate_ptr, up_ptr, gate_stride, up_stride, total_r, total_c, h_ptr,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of h, in the dtype of gate."""
    tile_r, _, cols, in_cols = _last_first(total_c, WIDTH, False)
    rows = tile_r * HEIGHT + tl.arange(0, HEIGHT)
    in_rows = rows < total_r
    h, _, _ = _hidden(gate_ptr, up_ptr, gate_stride, up_stride, rows, cols, in_rows, in_cols, KIND)
    offsets = rows[:, None].to(tl.int64) * total_c + cols[None, :]
    tl.store(h_ptr + offsets, to_dtype(h, h_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@Kernel
@triton.jit
def _backward_plain_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, half,
    d_gate_ptr, d_up_ptr,
    KIND: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of d gate and d up, in their own dtype."""
    tile_r, tile_c, cols, in_cols = _last_first(half, WIDTH, False)
    tiles = tiles_of(tile_c, half, WIDTH, False)
    rows = tile_r * HEIGHT + tl.arange(0, HEIGHT)
    in_rows = rows < total_r
    sources = dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, gate_scale, up_scale, total_r, None
    d_gate, d_up, _ = gradients(sources, rows, cols, in_rows, in_cols, tiles, KIND)
    offsets = rows[:, None].to(tl.int64) * half + cols[None, :]
    mask = in_rows[:, None] & in_cols[None, :]
    tl.store(d_gate_ptr + offsets, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if d_up_ptr is not None:
        tl.store(d_up_ptr + offsets, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)
