"""Optimizer step of many tensors in one launch: each program steps groups or whole rows of one tensor.

Per-tensor scales take an earlier launch, which finds the maxima and saves the old scales: in the step, one program may
overwrite a scale before another has read it.

With per-row scales (FP8 weights), a program walks along its rows in chunks. It stores everything but the new weights
at once; those stay in registers until the row's maximum is known. Tensors with equal numbers of chunks per row share a
launch.

Loads are issued well ahead of their use, and the tiles of a tensor's programs are adjacent in each iteration. These
kernels are bound by instructions as much as by memory, so rare cases get no branch: a dividend too small for the fast,
correctly rounded sequence counts as zero, in the reference too, and the operand of a small root is scaled.
"""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gradient.triton import groups_at, kind_of
from octavo.kernels.optimizer import Control, Layout, Slot
from octavo.kernels.optimizer.triton_tile import (
    COLUMNS,
    FIRST_PROGRAM,
    GRADIENT,
    M_SCALE,
    MASTER,
    MASTER_SCALE,
    MOMENTUM,
    NUMBER,
    ROWS,
    UPDATE,
    V_SCALE,
    WEIGHT,
    WEIGHT_SCALE,
    WIDTH,
    M,
    V,
    advance,
    has_one_scale,
    largest_found,
    low_bits,
    new_momentum,
    read_tile,
    set_aside,
    step_tile,
    tensor_scales,
    to_bf16,
    write_stored,
    write_weight,
)
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.storage import E4M3, GROUP, Storage, groups_of
from octavo.kernels.storage.triton import inverse_of, packed, scale_code, scale_of
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.quads import largest, quads_at, raise_to, store, words
from octavo.kernels.triton.shape import cdiv, next_power_of_2

WARPS = 4
"""Warps per program without per-row scales; fewest with them."""
GROUPS = 1
"""Groups per warp and iteration."""
STEPS = 8
"""Iterations per program."""
AHEAD = 2
"""Tiles loaded before the first is stepped."""
REGISTERS: int | None = 64
"""Limit per thread; None leaves it to the compiler."""
ROW_STEPS = 4
"""Row groups per program."""
ROW_AHEAD = 2
"""Chunks of a row loaded before the first is stepped."""
ROW_REGISTERS: int | None = 64
"""Limit per thread with per-row scales: other programs stay resident while one waits for its row's maximum."""
CHUNKS = 2
"""Most chunks per row, held in registers, before a program gets more warps (up to MOST_WARPS)."""
MOST_WARPS = 32

_RULES = {"adamw": 0, "adam": 1, "lion": 2, "given": 3, "momentum": 4}

C: tl.constexpr = tl.constexpr(12)
"""Coefficients per tensor."""


class Shape(NamedTuple):
    """Launch shape: warps, groups and rows per tile, chunks per row, iterations, tiles loaded ahead, registers."""

    warps: int
    groups: int
    rows: int
    chunks: int
    """0 without per-row scales."""
    steps: int
    ahead: int
    registers: int | None

    @classmethod
    def of_rows(cls, cols: int) -> Shape:
        """Return the shape for whole rows of `cols` values."""
        across = groups_of(cols)
        if across < WARPS:
            rows = WARPS // next_power_of_2(across)
            return cls(WARPS, WARPS, rows, 1, ROW_STEPS, ROW_AHEAD, ROW_REGISTERS)
        warps = WARPS
        while warps < MOST_WARPS and across > CHUNKS * warps:
            warps *= 2
        chunks = cdiv(across, warps)
        ahead = ROW_AHEAD if chunks <= CHUNKS else 1  # the held chunks leave no registers for more
        return cls(warps, warps, 1, chunks, ROW_STEPS, ahead, ROW_REGISTERS)

    @classmethod
    def flat(cls, cols: int = 0) -> Shape:
        """Return the shape for groups of any row; `cols` is unused."""
        return cls(WARPS, WARPS * GROUPS, 0, 0, STEPS, AHEAD, REGISTERS)

    def meta(self) -> dict[str, Any]:
        """Return the meta-parameters of a launch."""
        return {
            "TILE": self.groups, "STEPS": self.steps, "AHEAD": self.ahead,
            "num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": False,
        }  # fmt: skip

    def programs(self, rows: int, cols: int) -> int:
        """Return the number of programs for a matrix."""
        own, each = (rows, self.rows) if self.chunks else (rows * groups_of(cols), self.groups)
        return -(-own // (each * self.steps))


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: PinnedStaging) -> None:
    """See `octavo.kernels.optimizer.update`."""
    by_shape: dict[tuple[Shape, bool], list[_Place]] = {}
    places = [_Place.of(slot) for slot in slots if slot.weight.numel()]
    shape_of = Shape.of_rows if layout.weight == E4M3.dtype else Shape.flat
    shapes = {cols: shape_of(cols) for cols in {place.cols for place in places}}
    for place in places:
        by_shape.setdefault((shapes[place.cols], place.is_whole), []).append(place)
    for (shape, whole), alike in by_shape.items():
        _launch(alike, shape, whole, layout, control, uploads, layout.rule)


def momentum(
    slots: Sequence[Slot],
    layout: Layout,
    control: Control,
    updates: Sequence[Tensor],
    uploads: PinnedStaging,
    nesterov: bool,
) -> None:
    """See `octavo.kernels.optimizer.momentum`."""
    places = [_Place.of(*pair) for pair in zip(slots, updates, strict=True) if pair[1].numel()]
    for whole in (True, False):
        alike = [place for place in places if place.is_whole is whole]
        if alike:
            _launch(alike, Shape.flat(), whole, layout, control, uploads, "momentum", nesterov)


class _Place(NamedTuple):
    """Sizes and addresses of a tensor and its state."""

    row: int
    """Row of `Control`."""
    rows: int
    cols: int
    number: int
    addresses: tuple[int, ...]
    """Columns of the tensor table from WEIGHT on; 0 for absent tensors."""

    @classmethod
    def of(cls, slot: Slot, update: Tensor | None = None) -> _Place:
        rows, cols = slot.gradient.shape
        tensors = (*slot[2:], update)
        return cls(slot.row, rows, cols, slot.number, (*[0 if t is None else t.data_ptr() for t in tensors],))

    @property
    def is_whole(self) -> bool:
        """Whether quads load as vectors: rows are whole groups, and all tensors are 16-byte aligned."""
        return self.cols % GROUP == 0 and not any(address % 16 for address in _READ_BY_QUADS(self.addresses))


_READ_BY_QUADS = itemgetter(*(column.value - WEIGHT.value for column in (WEIGHT, GRADIENT, MASTER, M, V, UPDATE)))


def _launch(
    places: Sequence[_Place],
    shape: Shape,
    whole: bool,
    layout: Layout,
    control: Control,
    uploads: PinnedStaging,
    rule: str,
    nesterov: bool = False,
) -> None:
    device = control.skip.device
    name = (rule, layout, places[0].number)  # the tensor's number tells single-tensor launches apart
    is_momentum, flat = rule == "momentum", Shape.flat()
    common = {
        "KIND": kind_of(layout.gradient, layout.gradient_scaling),
        "FIRST": _packed(layout.first),
        "WHOLE": whole,
    }
    weights = {"RULE": _RULES[rule], **_weight_meta(layout, is_momentum)}
    table, owners = _tables(places, shape, name, uploads, device)
    maxima = control.skip  # not read
    if layout.searches:
        maxima = torch.zeros(len(control.steps), 6, dtype=torch.int32, device=device)
        searched = (table, owners) if shape == flat else _tables(places, flat, name, uploads, device)
        _update_search_kernel[(len(searched[1]),)](
            *searched, control.coefficients, control.skip, maxima, **common, **weights, **flat.meta()
        )
    arguments = table, owners, control.coefficients, control.steps, control.skip, control.clamped, maxima, control.seed
    common |= {"STOCHASTIC": layout.stochastic, **shape.meta()}
    if is_momentum:
        _momentum_kernel[(len(owners),)](*arguments, **common, NESTEROV=nesterov)
    else:
        _update_kernel[(len(owners),)](*arguments, **common, **weights, ACROSS=shape.rows, CHUNKS=shape.chunks)


def _tables(
    places: Sequence[_Place], shape: Shape, name: tuple[Hashable, ...], uploads: PinnedStaging, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the tensor table, int64 (T, WIDTH), and per program its tensor and its row of `Control`, int32 (P, 2)."""

    def table() -> Tensor:
        starts = accumulate(programs(), initial=0)
        rows = [(p.rows, p.cols, start, p.number, *p.addresses) for p, start in zip(places, starts, strict=False)]
        return torch.tensor(rows, dtype=torch.int64)

    def owners() -> Tensor:
        pairs = [(index, place.row) for index, place in enumerate(places)]
        return torch.tensor(pairs, dtype=torch.int32).repeat_interleave(torch.tensor(programs()), dim=0)

    def programs() -> list[int]:
        return [shape.programs(place.rows, place.cols) for place in places]

    name = (*name, shape)
    moved = uploads(("places", *name), tuple(places), table, device)
    return moved, uploads(("owners", *name), tuple(place[:3] for place in places), owners, device)


def _weight_meta(layout: Layout, is_momentum: bool) -> dict[str, Any]:
    """Return the constants for weight, second moment and master; the latter two are None for `momentum`."""
    fmt, dropped = layout.split or (None, 0)
    plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", E4M3.dtype: "e4m3"}
    return {
        "W": packed(Storage(plain[layout.weight])),
        "SECOND": None if is_momentum else _packed(layout.second),
        "APART": None if is_momentum else _packed(layout.master),
        "REMAINDER": layout.remainder_bits if fmt else 0,
        "DROPPED": dropped,
    }


def _packed(storage: Storage | None) -> tuple[Any, ...] | None:
    return None if storage is None else packed(storage)


@Kernel
@triton.jit
def _update_kernel(
    table, owners, coefficients, steps, skip, clamped, maxima, seed,
    RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, ACROSS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    ROUNDS: tl.constexpr = STOCHASTIC and APART is None
    row, slot, first = _owned(table, owners)
    if tl.load(skip) != 0:
        return
    tensors = _tensors(row)
    c = _coefficients(coefficients + C * slot)
    step = tl.load(steps + slot)
    scales = tensor_scales(tensors, maxima + 6 * slot, first, FIRST, SECOND, APART)
    num_clamped = tl.zeros((TILE, 32), tl.float32)
    if CHUNKS == 0:
        for turn in range(0, STEPS, AHEAD):
            read = _read_ahead(
                first, turn, tensors, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, WHOLE, TILE, STEPS, AHEAD
            )
            for i in tl.static_range(AHEAD):
                at, fetched = read[i]
                w, weight_bits, more = step_tile(
                    fetched, tensors, at, c, scales, seed, step, None, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER,
                    DROPPED, STOCHASTIC, WHOLE,
                )  # fmt: skip
                num_clamped += more
                write_weight(w, tensors, at, W, REMAINDER, DROPPED, weight_bits, ROUNDS, WHOLE)
    else:
        for turn in range(STEPS):
            # CHUNKS chunks of TILE groups, in ACROSS rows.
            tensors = _tensors(row)  # reloaded here and below, or values derived from it would occupy registers
            place = first + turn * tl.cdiv(tensors[ROWS], ACROSS * STEPS)
            kept, largest_w = (), tl.zeros((TILE,), tl.int32)
            at, scale_ptr = _rows_at(place, 0, tensors, WHOLE, TILE, ACROSS)
            scale = tl.load(scale_ptr, mask=at[1], other=1.0)[:, None]
            for chunk in tl.static_range(0, CHUNKS, AHEAD):
                read = ()
                for i in tl.static_range(chunk, min(chunk + AHEAD, CHUNKS)):
                    at, _ = _rows_at(place, i, tensors, WHOLE, TILE, ACROSS)
                    read += ((at, read_tile(tensors, at, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, WHOLE)),)
                for i in tl.static_range(min(AHEAD, CHUNKS - chunk)):
                    at, fetched = read[i]
                    w, weight_bits, more = step_tile(
                        fetched, tensors, at, c, scales, seed, step, scale, RULE, W, KIND, FIRST, SECOND, APART,
                        REMAINDER, DROPPED, STOCHASTIC, WHOLE,
                    )  # fmt: skip
                    num_clamped += more
                    kept += ((w, weight_bits),)
                    largest_w = tl.maximum(largest_w, largest(w))
            exponent = scale_code(_row_maxima(largest_w, TILE, ACROSS), W[3])
            inverse = inverse_of(exponent)[:, None]
            tensors = _tensors(row)
            at, scale_ptr = _rows_at(place, 0, tensors, WHOLE, TILE, ACROSS)
            tl.store(scale_ptr, scale_of(exponent), mask=at[1] & (tl.arange(0, TILE) % (TILE // ACROSS) == 0))
            for chunk in tl.static_range(CHUNKS):
                at, _ = _rows_at(place, chunk, tensors, WHOLE, TILE, ACROSS)
                w, weight_bits = kept[chunk]
                w = (w[0] * inverse, w[1] * inverse, w[2] * inverse, w[3] * inverse)
                write_weight(w, tensors, at, W, REMAINDER, DROPPED, weight_bits, ROUNDS, WHOLE)
    count = tl.sum(tl.sum(num_clamped, axis=1), axis=0)
    if count > 0:
        tl.atomic_add(clamped, count.to(tl.int64), sem="relaxed")


@Kernel
@triton.jit
def _update_search_kernel(
    table, owners, coefficients, skip, maxima,
    RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Find the maxima for per-tensor scales, and save the old scales."""
    row, slot, first = _owned(table, owners)
    if tl.load(skip) != 0:
        return
    tensors = _tensors(row)
    c = _coefficients(coefficients + C * slot)
    amax = maxima + 6 * slot  # three maxima, as bits, and the three old scales
    scales = (
        set_aside(tensors[M_SCALE], amax + 3, first, FIRST),
        set_aside(tensors[V_SCALE], amax + 4, first, SECOND),
        set_aside(tensors[MASTER_SCALE], amax + 5, first, APART),
    )
    zeros = tl.zeros((TILE, 32), tl.int32)
    found_m, found_v, found_w = zeros, zeros, zeros
    for turn in range(0, STEPS, AHEAD):
        read = _read_ahead(
            first, turn, tensors, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, WHOLE, TILE, STEPS, AHEAD
        )
        for i in tl.static_range(AHEAD):
            at, fetched = read[i]
            scale = None
            if W[2] == 8 and APART is None and RULE != MOMENTUM:
                own = at[0] // ((tensors[COLUMNS] + 127) // 128)
                scale = tl.load(_row_scales(tensors) + own, mask=at[1], other=1.0)[:, None]
            new_w, new_m, new_v, _ = advance(
                fetched, c, scales, scale, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, DROPPED, WHOLE
            )
            found_m = tl.maximum(found_m, largest_found(new_m, FIRST))
            found_v = tl.maximum(found_v, largest_found(new_v, SECOND))
            found_w = tl.maximum(found_w, largest_found(new_w, APART))
    if has_one_scale(FIRST):
        raise_to(amax, found_m)
    if has_one_scale(SECOND):
        raise_to(amax + 1, found_v)
    if has_one_scale(APART):
        raise_to(amax + 2, found_w)


@Kernel
@triton.jit
def _momentum_kernel(
    table, owners, coefficients, steps, skip, clamped, maxima, seed,
    KIND: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row, slot, first = _owned(table, owners)
    if tl.load(skip) != 0:
        return
    tensors = _tensors(row)
    c = _coefficients(coefficients + C * slot)
    step = tl.load(steps + slot)
    scales = tensor_scales(tensors, maxima + 6 * slot, first, FIRST, None, None)
    for turn in range(0, STEPS, AHEAD):
        read = _read_ahead(first, turn, tensors, MOMENTUM, None, KIND, FIRST, None, None, 0, WHOLE, TILE, STEPS, AHEAD)
        for i in tl.static_range(AHEAD):
            at, fetched = read[i]
            new_m, gradient = new_momentum(fetched, c, scales, KIND, FIRST, WHOLE)
            updates = ()
            for j in tl.static_range(4):
                u = gradient[j] + c[11] * new_m[j] if NESTEROV else new_m[j]
                updates += (to_bf16(u),)
            random = low_bits(words(seed, at[0], tensors[NUMBER], step))
            write_stored(new_m, tensors[M], tensors[M_SCALE], scales[3], at, FIRST, random, STOCHASTIC, WHOLE)
            store(updates, tensors[UPDATE], at, 2, WHOLE)


@triton.jit
def _read_ahead(
    first, turn, tensors, RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Load the tiles of the next AHEAD iterations: pairs of position and raw words.

    In each iteration the tiles of a tensor's programs are adjacent.
    """
    rows, cols = tensors[ROWS], tensors[COLUMNS]
    stride = tl.cdiv(rows * ((cols + 127) // 128), TILE * STEPS)
    read = ()
    for i in tl.static_range(AHEAD):
        at = groups_at(first + (turn + i) * stride, rows, cols, WHOLE, TILE)
        read += ((at, read_tile(tensors, at, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, WHOLE)),)
    return read


@triton.jit
def _owned(table, owners):
    """Pointer to this program's row of the table, its row of `Control`, its index among the tensor's programs."""
    program = tl.program_id(0)
    row = table + WIDTH * tl.load(owners + 2 * program)
    slot = tl.load(owners + 2 * program + 1)
    return row, slot, program - tl.load(row + FIRST_PROGRAM).to(tl.int32)


@triton.jit
def _tensors(row):
    return (
        tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3),
        tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9),
        tl.load(row + 10), tl.load(row + 11), tl.load(row + 12), tl.load(row + 13), tl.load(row + 14),
    )  # fmt: skip


@triton.jit
def _coefficients(c):
    return (
        tl.load(c), tl.load(c + 1), tl.load(c + 2), tl.load(c + 3), tl.load(c + 4), tl.load(c + 5), tl.load(c + 6),
        tl.load(c + 7), tl.load(c + 8), tl.load(c + 9), tl.load(c + 10), tl.load(c + 11),
    )  # fmt: skip


@triton.jit
def _rows_at(first, chunk, tensors, WHOLE: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr):
    """Position of a chunk's groups, and pointers to their row scales."""
    place = tl.arange(0, TILE)
    own = first * ACROSS + place // (TILE // ACROSS)
    column = chunk * (TILE // ACROSS) + place % (TILE // ACROSS)
    at = quads_at(own, column, tensors[ROWS], (tensors[COLUMNS] + 127) // 128, tensors[COLUMNS], WHOLE)
    return at, _row_scales(tensors) + own


@triton.jit
def _row_scales(tensors):
    return tensors[WEIGHT_SCALE].to(tl.pointer_type(tl.float32))


@triton.jit
def _row_maxima(x, TILE: tl.constexpr, ACROSS: tl.constexpr):
    """Reduce a tile to row maxima, broadcast to the groups, (TILE)."""
    if ACROSS == 1:
        x = tl.max(x, axis=0) + tl.zeros((TILE,), tl.int32)
    elif ACROSS != TILE:
        by_row = tl.max(tl.reshape(x, (ACROSS, TILE // ACROSS)), axis=1)
        x = tl.reshape(tl.broadcast_to(by_row[:, None], (ACROSS, TILE // ACROSS)), (TILE,))
    return x
