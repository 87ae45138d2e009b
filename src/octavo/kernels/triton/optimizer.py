"""One step of many tensors in one launch: a program takes some groups of one tensor, or some whole rows.

Where a scale belongs to a whole tensor, there are two launches. The first only searches for the maxima, and sets aside
the scales of before: the second, one of whose programs may be done before another begins, writes over them.

Where a scale belongs to a row, as an FP8 weight's does, a program walks along its rows in chunks. All but the new
weights is written at once; they stay in registers until the row's maximum is known. Tensors are launched together
whose rows take as many chunks.

These kernels are bound by instructions as much as by memory. Hence no branch for what hardly ever is: a root or a
quotient too small for the fast sequence that rounds correctly counts as zero, in the reference too.
"""

# mypy: disable-error-code=assignment
# A kernel's tuples grow, which Triton unrolls and mypy does not take for the same variable.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.optimizer import Control, Layout, Slot
from octavo.kernels.storage import E4M3, GROUP, Storage, groups_of
from octavo.kernels.triton.codes import INTERPRETED
from octavo.kernels.triton.gradient import groups_at, kind_of, read_gradient
from octavo.kernels.triton.quads import largest, load, load_bytes, quads_at, store, store_bytes, words
from octavo.kernels.triton.storage import (
    as_bits,
    as_float,
    bits_of,
    decode,
    encode,
    inverse_of,
    magnitude_of,
    packed,
    round_up,
    scale_code,
    scale_of,
    sign_of,
    top_of,
)
from octavo.kernels.uploads import Uploads

WARPS = 4
"""Of a program that has no rows; each has a group at a time."""
STEPS = 8
"""How often."""
CHUNKS = 4
"""Of a row, at most, as long as there may be more warps: what a thread keeps in registers."""
MOST_WARPS = 16

_RULES = {"adamw": 0, "adam": 1, "lion": 2, "given": 3}
ADAM: tl.constexpr = tl.constexpr(1)
LION: tl.constexpr = tl.constexpr(2)
GIVEN: tl.constexpr = tl.constexpr(3)
ROWS: tl.constexpr = tl.constexpr(0)
COLUMNS: tl.constexpr = tl.constexpr(1)
FIRST_PROGRAM: tl.constexpr = tl.constexpr(2)
NUMBER: tl.constexpr = tl.constexpr(3)
WEIGHT: tl.constexpr = tl.constexpr(4)
WEIGHT_SCALE: tl.constexpr = tl.constexpr(5)
GRADIENT: tl.constexpr = tl.constexpr(6)
MASTER: tl.constexpr = tl.constexpr(7)
MASTER_SCALE: tl.constexpr = tl.constexpr(8)
M: tl.constexpr = tl.constexpr(9)
M_SCALE: tl.constexpr = tl.constexpr(10)
V: tl.constexpr = tl.constexpr(11)
V_SCALE: tl.constexpr = tl.constexpr(12)
GRADIENT_SCALE: tl.constexpr = tl.constexpr(13)
UPDATE: tl.constexpr = tl.constexpr(14)
WIDTH: tl.constexpr = tl.constexpr(15)
"""Columns of the table that says where each tensor lies: sizes, the tensors of a `Slot`, an update."""

C: tl.constexpr = tl.constexpr(12)
"""Columns of the coefficients."""


class Shape(NamedTuple):
    """How a program goes over a tensor: so many groups at a time, one a warp, of so many rows, so often."""

    warps: int
    rows: int
    chunks: int
    """0 where rows do not matter."""

    @classmethod
    def of_rows(cls, cols: int) -> Shape:
        """Return how whole rows of so many values are taken."""
        across = groups_of(cols)
        if across < WARPS:
            return cls(WARPS, WARPS // triton.next_power_of_2(across), 1)
        warps = WARPS
        while warps < MOST_WARPS and across > CHUNKS * warps:
            warps *= 2
        return cls(warps, 1, triton.cdiv(across, warps))

    def programs(self, rows: int, cols: int) -> int:
        """Return how many programs a matrix takes."""
        own, each = (rows, self.rows) if self.chunks else (rows * groups_of(cols), self.warps * STEPS)
        return -(-own // each)


FLAT = Shape(WARPS, 0, 0)


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: Uploads) -> None:
    """See `octavo.kernels.optimizer.update`."""
    by_shape: dict[tuple[Shape, bool], list[Slot]] = {}
    for slot in slots:
        if slot.weight.numel():
            shape = Shape.of_rows(slot.weight.shape[1]) if layout.weight == E4M3.dtype else FLAT
            by_shape.setdefault((shape, _is_whole(slot)), []).append(slot)
    for (shape, whole), alike in by_shape.items():
        meta = _weight_meta(layout, shape)
        _launch(_update_kernel, alike, [None] * len(alike), shape, whole, layout, control, uploads, **meta)


def momentum(
    slots: Sequence[Slot],
    layout: Layout,
    control: Control,
    updates: Sequence[Tensor],
    uploads: Uploads,
    nesterov: bool,
) -> None:
    """See `octavo.kernels.optimizer.momentum`."""
    pairs = [(slot, update) for slot, update in zip(slots, updates, strict=True) if update.numel()]
    for whole in (True, False):
        own = [pair for pair in pairs if _is_whole(*pair) is whole]
        if own:
            found, into = zip(*own, strict=True)
            _launch(_momentum_kernel, found, into, FLAT, whole, layout, control, uploads, NESTEROV=nesterov)


def _is_whole(slot: Slot, *others: Tensor) -> bool:
    """Whether rows are whole groups, and all tensors begin at multiples of 16 bytes, so that quads are read at once."""
    shape = slot.gradient.shape
    tensors = [t for t in (*slot[2:], *others) if isinstance(t, Tensor) and t.shape == shape]
    return shape[1] % GROUP == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def _launch(
    kernel: Any,
    slots: Sequence[Slot],
    updates: Sequence[Tensor | None],
    shape: Shape,
    whole: bool,
    layout: Layout,
    control: Control,
    uploads: Uploads,
    **meta: Any,
) -> None:
    device = slots[0].gradient.device
    name = (kernel.__name__, layout, slots[0].number)  # the first tells apart what is released one by one
    places, owners = _tables(slots, updates, shape, name, uploads, device)
    maxima = torch.zeros(len(control.steps) if layout.searches else 1, 6, dtype=torch.int32, device=device)
    for search in (True, False) if layout.searches else (False,):
        kernel[(len(owners),)](
            places, owners, control.coefficients, control.steps, control.skip, control.clamped, maxima, control.seed,
            KIND=kind_of(layout.gradient, layout.gradient_scaling), FIRST=_packed(layout.first),
            STOCHASTIC=layout.stochastic, WHOLE=whole, TILE=shape.warps, STEPS=STEPS, SEARCH=search, **meta,
            num_warps=shape.warps, enable_fp_fusion=False,
        )  # fmt: skip


def _tables(
    slots: Sequence[Slot],
    updates: Sequence[Tensor | None],
    shape: Shape,
    name: tuple[Hashable, ...],
    uploads: Uploads,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return where each tensor lies, int64 (T, WIDTH), and for each program its tensor and its row of `Control`."""
    sizes = [slot.gradient.shape for slot in slots]
    counts = [shape.programs(*size) for size in sizes]
    starts = [0, *accumulate(counts)][:-1]
    rows = tuple(
        (*size, start, slot.number, *(0 if t is None else t.data_ptr() for t in (*slot[2:], update)))
        for slot, size, start, update in zip(slots, sizes, starts, updates, strict=True)
    )
    numbers = tuple((place, slot.row) for place, slot in enumerate(slots))

    def owners() -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).repeat_interleave(torch.tensor(counts), dim=0)

    places = uploads(("places", *name), rows, lambda: torch.tensor(rows, dtype=torch.int64), device)
    return places, uploads(("owners", *name), (numbers, tuple(counts)), owners, device)


def _weight_meta(layout: Layout, shape: Shape) -> dict[str, Any]:
    fmt, dropped = layout.split or (None, 0)
    plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", E4M3.dtype: "e4m3"}
    return {
        "RULE": _RULES[layout.rule],
        "W": packed(Storage(plain[layout.weight])),
        "SECOND": _packed(layout.second),
        "APART": _packed(layout.master),
        "REMAINDER": layout.remainder_bits if fmt else 0,
        "DROPPED": dropped,
        "ACROSS": shape.rows,
        "CHUNKS": shape.chunks,
    }


def _packed(storage: Storage | None) -> tuple[Any, ...] | None:
    return None if storage is None else packed(storage)


@triton.jit
def _update_kernel(
    table, owners, coefficients, steps, skip, clamped, maxima, seed,
    RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, ACROSS: tl.constexpr, CHUNKS: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    ROUNDS: tl.constexpr = STOCHASTIC and APART is None
    if tl.load(skip) != 0:
        return
    row, slot, first = _owned(table, owners)
    tensors = _tensors(row)
    c = _coefficients(coefficients + C * slot)
    amax = maxima + 6 * slot  # three maxima, as bits, and the three scales of before
    step = tl.load(steps + slot)
    held = tl.zeros((TILE, 32), tl.int32)
    if CHUNKS == 0:
        for turn in range(STEPS):
            at = groups_at(first * STEPS + turn, tensors[ROWS], tensors[COLUMNS], WHOLE, TILE)
            w, rest, more = _step(
                tensors, at, c, amax, seed, step, None, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, DROPPED,
                STOCHASTIC, WHOLE, SEARCH,
            )  # fmt: skip
            held += more
            if not SEARCH:
                _write_weight(w, tensors, at, W, REMAINDER, DROPPED, rest, ROUNDS, WHOLE)
    else:
        # At most CHUNKS, of as many groups as TILE, in ACROSS rows.
        kept, largest_w = (), tl.zeros((TILE,), tl.int32)
        for chunk in tl.static_range(CHUNKS):
            at, of_row = _rows_at(first, chunk, tensors, WHOLE, TILE, ACROSS)
            scale = tl.load(of_row, mask=at[1], other=1.0)[:, None]
            w, rest, more = _step(
                tensors, at, c, amax, seed, step, scale, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, DROPPED,
                STOCHASTIC, WHOLE, SEARCH,
            )  # fmt: skip
            held += more
            kept += ((w, rest),)
            largest_w = tl.maximum(largest_w, largest(w))
        if not SEARCH:
            exponent = scale_code(_of_rows(largest_w, TILE, ACROSS), W[3])
            inverse = inverse_of(exponent)[:, None]
            tensors = _tensors(row)  # again: else what was reckoned from it above would be kept in registers
            for chunk in tl.static_range(CHUNKS):
                at, of_row = _rows_at(first, chunk, tensors, WHOLE, TILE, ACROSS)
                if chunk == 0:
                    tl.store(of_row, scale_of(exponent), mask=at[1] & (tl.arange(0, TILE) % (TILE // ACROSS) == 0))
                w, rest = kept[chunk]
                w = (w[0] * inverse, w[1] * inverse, w[2] * inverse, w[3] * inverse)
                _write_weight(w, tensors, at, W, REMAINDER, DROPPED, rest, ROUNDS, WHOLE)
    if not SEARCH:
        count = tl.sum(tl.sum(held, axis=1), axis=0)
        if count > 0:
            tl.atomic_add(clamped, count.to(tl.int64), sem="relaxed")


@triton.jit
def _momentum_kernel(
    table, owners, coefficients, steps, skip, clamped, maxima, seed,
    KIND: tl.constexpr, FIRST: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    row, slot, first = _owned(table, owners)
    tensors = _tensors(row)
    c = _coefficients(coefficients + C * slot)
    amax = maxima + 6 * slot
    step = tl.load(steps + slot)
    for turn in range(STEPS):
        at = groups_at(first * STEPS + turn, tensors[ROWS], tensors[COLUMNS], WHOLE, TILE)
        g = read_gradient(tensors[GRADIENT], tensors[GRADIENT_SCALE], at, KIND, WHOLE)
        m = _read(tensors[M], tensors[M_SCALE], amax + 3, at, FIRST, WHOLE, SEARCH)
        new, updates = (), ()
        for i in tl.static_range(4):
            scaled = g[i] * c[0]
            x = m[i] * c[11] + scaled
            u = scaled + c[11] * x if NESTEROV else x
            new += (x,)
            updates += (_bf16(u),)
        random = _low(words(seed, at[0], tensors[NUMBER], step))
        _write(new, tensors[M], tensors[M_SCALE], amax, at, FIRST, random, STOCHASTIC, WHOLE, SEARCH)
        if not SEARCH:
            store(updates, tensors[UPDATE], at, 2, WHOLE)


@triton.jit
def _owned(table, owners):
    """A program's tensor: where its row of the table is, its row of `Control`, which of its programs this is."""
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
    """The groups of a chunk of rows, and where their rows' scales are."""
    place = tl.arange(0, TILE)
    own = first * ACROSS + place // (TILE // ACROSS)
    column = chunk * (TILE // ACROSS) + place % (TILE // ACROSS)
    at = quads_at(own, column, tensors[ROWS], (tensors[COLUMNS] + 127) // 128, tensors[COLUMNS], WHOLE)
    return at, tensors[WEIGHT_SCALE].to(tl.pointer_type(tl.float32)) + own


@triton.jit
def _of_rows(x, TILE: tl.constexpr, ACROSS: tl.constexpr):
    """For each group of a tile, the maximum of its row."""
    if ACROSS == 1:
        x = tl.max(x, axis=0) + tl.zeros((TILE,), tl.int32)
    elif ACROSS != TILE:
        by_row = tl.max(tl.reshape(x, (ACROSS, TILE // ACROSS)), axis=1)
        x = tl.reshape(tl.broadcast_to(by_row[:, None], (ACROSS, TILE // ACROSS)), (TILE,))
    return x


@triton.jit
def _step(
    tensors, at, c, amax, seed, step, weight_scale, RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """All of a step but the weight's own codes.

    Returns the new FP32 weights, the random bits of their rounding, and how many updates were held back.
    """
    w = _read_weight(tensors, at, weight_scale, W, APART, REMAINDER, DROPPED, WHOLE, amax + 5, SEARCH)
    g = read_gradient(tensors[GRADIENT], tensors[GRADIENT_SCALE], at, KIND, WHOLE)
    m = g
    if RULE != GIVEN:
        m = _read(tensors[M], tensors[M_SCALE], amax + 3, at, FIRST, WHOLE, SEARCH)
    v = m
    if SECOND is not None:
        v = _read(tensors[V], tensors[V_SCALE], amax + 4, at, SECOND, WHOLE, SEARCH)
    new_w, new_m, new_v, held = (), (), (), at[2].to(tl.int32) * 0
    for i in tl.static_range(4):
        x, m_i, v_i, root, u = _rule(w[i], g[i] * c[0], m[i], v[i], c, RULE)
        limit = c[10]
        held += (at[3][i] & (tl.abs(u) > limit)).to(tl.int32)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
        new_w += (x - c[7] * u,)
        new_m += (m_i,)
        if SECOND is not None:
            new_v += (root if SECOND[6] else v_i,)

    random = words(seed, at[0], tensors[NUMBER], step)
    if RULE != GIVEN:
        _write(new_m, tensors[M], tensors[M_SCALE], amax, at, FIRST, _low(random), STOCHASTIC, WHOLE, SEARCH)
    if SECOND is not None:
        _write(new_v, tensors[V], tensors[V_SCALE], amax + 1, at, SECOND, _high(random), STOCHASTIC, WHOLE, SEARCH)
    rest = _rest(random)
    if APART is not None:
        new_w = _write(
            new_w, tensors[MASTER], tensors[MASTER_SCALE], amax + 2, at, APART, _taken_apart(rest), STOCHASTIC, WHOLE,
            SEARCH,
        )  # fmt: skip
    return new_w, rest, held


@triton.jit
def _rule(w, g, m, v, c, RULE: tl.constexpr):
    """The weight but for its update, both moments, the second one's root, and the update."""
    root = v
    if RULE == GIVEN:
        u = g
    elif RULE == LION:
        difference = g - m
        u = m + c[1] * difference
        u = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u * 0.0))
        m = m + c[3] * difference
    else:
        if RULE == ADAM:
            g = g + c[9] * w
        m = m + c[1] * (g - m)
        v = tl.minimum(v * c[2] + c[3] * (g * g), 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
        root = _root(v)
        u = _quotient(m * c[4], tl.maximum(root * c[5] + c[6], TINY, propagate_nan=tl.PropagateNan.ALL))
    return w * c[8], m, v, root, u


TINY: tl.constexpr = tl.constexpr(2.0**-100)
"""Below which a number has not enough bits left for the sequences that round correctly."""


@triton.jit
def _root(x):
    """The square root, correctly rounded; 0 below TINY."""
    if INTERPRETED:
        root = tl.sqrt_rn(x)
    else:
        root = tl.inline_asm_elementwise(ROOT, "=f,f", [x], tl.float32, True, 1)
    return tl.where(x < TINY, 0.0, root)


@triton.jit
def _quotient(x, by):
    """x / by, correctly rounded, by no less than TINY; 0 where x is below it, NaN where the quotient overflows."""
    if INTERPRETED:
        quotient = tl.div_rn(x, by)
        quotient = tl.where(tl.abs(quotient) == float("inf"), float("nan"), quotient)
    else:
        quotient = tl.inline_asm_elementwise(QUOTIENT, "=f,f,f", [x, by], tl.float32, True, 1)
    return tl.where(tl.abs(x) < TINY, 0.0, quotient)


# An estimate, and what it lacks, as the hardware's own sequences have it but for their branch to rare cases.
ROOT: tl.constexpr = tl.constexpr("""{
    .reg .f32 near, half, root, minus, rest;
    rsqrt.approx.ftz.f32 near, $1;
    mul.rn.f32 root, $1, near;
    mul.rn.f32 half, near, 0f3F000000;
    neg.f32 minus, root;
    fma.rn.f32 rest, minus, root, $1;
    fma.rn.f32 $0, rest, half, root;
}""")
QUOTIENT: tl.constexpr = tl.constexpr("""{
    .reg .f32 near, minus, rest, quotient;
    rcp.approx.ftz.f32 near, $2;
    neg.f32 minus, $2;
    fma.rn.f32 rest, minus, near, 0f3F800000;
    fma.rn.f32 near, near, rest, near;
    mul.rn.f32 quotient, $1, near;
    fma.rn.f32 rest, minus, quotient, $1;
    fma.rn.f32 quotient, rest, near, quotient;
    fma.rn.f32 rest, minus, quotient, $1;
    fma.rn.f32 $0, rest, near, quotient;
}""")


@triton.jit
def _low(words):
    """The random bits of the first moment."""
    return (_int(words[0] & 0xFFFF), _int(words[1] & 0xFFFF), _int(words[2] & 0xFFFF), _int(words[3] & 0xFFFF))


@triton.jit
def _high(words):
    """Those of the second."""
    return (_int(words[0] >> 16), _int(words[1] >> 16), _int(words[2] >> 16), _int(words[3] >> 16))


@triton.jit
def _rest(words):
    """Those of the weight, two in a word: they may have to be kept until a row is done."""
    factor = tl.full((), 0x9E3779B9, tl.uint32)
    first = ((words[0] * factor) >> 16) | ((words[1] * factor) & 0xFFFF0000)
    return first, ((words[2] * factor) >> 16) | ((words[3] * factor) & 0xFFFF0000)


@triton.jit
def _taken_apart(rest):
    return _int(rest[0] & 0xFFFF), _int(rest[0] >> 16), _int(rest[1] & 0xFFFF), _int(rest[1] >> 16)


@triton.jit
def _int(word):
    return word.to(tl.int32)


@triton.jit
def _bf16(x):
    """The nearest BF16 in the top bits, ties to even; NaN stays one."""
    bits = round_up(as_bits(x), 16, 0, False)
    return tl.where(x == x, bits, 0x7FC00000)


@triton.jit
def _read(
    codes, scale, before, at, S: tl.constexpr, WHOLE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Four times the FP32 values of stored ones; S: their storage."""
    values = load(codes, at, S[2] // 8, WHOLE)
    if S[5] != 0:
        if S[5] == 2:
            by = scale_of(load_bytes(scale, at))
        elif SEARCH:
            exponent = tl.load(scale.to(tl.pointer_type(tl.uint8))).to(tl.int32)
            tl.store(before, exponent)
            by = scale_of(exponent)
        else:
            by = scale_of(tl.load(before))
    read = ()
    for i in tl.static_range(4):
        x = values[i]
        if S[2] != 32:
            x = decode(x, S)
        if S[5] != 0:
            x = x * by
        read += (x * x if S[6] else x,)
    return read


@triton.jit
def _write(
    values, address, scale, amax, at, S: tl.constexpr, random, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """Store four times FP32 values, roots already taken, and return what was stored; or search for their maximum.

    They are 0 where there is nothing, as all that they were computed from is.
    """
    stored = values
    if SEARCH:
        if S[5] == 1:
            tl.atomic_max(amax, tl.max(largest(values), axis=0), sem="relaxed")
    else:
        inverse, by = 1.0, 1.0
        if S[5] != 0:
            if S[5] == 1:
                exponent = scale_code(tl.load(amax), S[3])
                tl.store(scale.to(tl.pointer_type(tl.uint8)), exponent.to(tl.uint8))
            else:
                exponent = scale_code(largest(values), S[3])[:, None]
                store_bytes(exponent, scale, at)
            inverse, by = inverse_of(exponent), scale_of(exponent)
        codes, stored = (), ()
        for i in tl.static_range(4):
            x = values[i]
            if S[5] != 0:
                x = x * inverse
            if S[2] != 32:
                x = encode(x, S, random[i], ROUNDS)
            codes += (x,)
            if S[2] != 32:
                x = decode(x, S)
            if S[5] != 0:
                x = x * by
            stored += (tl.where(values[i] == values[i], x, values[i]),)  # no code is read as NaN
        store(codes, address, at, S[2] // 8, WHOLE)
    return stored


@triton.jit
def _read_weight(
    tensors, at, scale, W: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    WHOLE: tl.constexpr, before, SEARCH: tl.constexpr,
):  # fmt: skip
    """Four times the FP32 master. scale: of the rows, or None."""
    if APART is not None:
        read = _read(tensors[MASTER], tensors[MASTER_SCALE], before, at, APART, WHOLE, SEARCH)
    elif W[2] == 32:
        read = load(tensors[WEIGHT], at, 4, WHOLE)
    else:
        codes = load(tensors[WEIGHT], at, W[2] // 8, WHOLE)
        low = codes
        if REMAINDER != 0:
            low = load(tensors[MASTER], at, REMAINDER // 8, WHOLE)
        read = ()
        for i in tl.static_range(4):
            if REMAINDER == 0:
                w = decode(codes[i], W)
            else:
                magnitude = magnitude_of(codes[i], W) + ((low[i] >> (32 - REMAINDER)) << DROPPED)
                w = as_float(tl.maximum(magnitude, 0) | sign_of(codes[i])) * (1.0 / W[1])
            if scale is not None:
                w = w * scale
            read += (w,)
    return read


@triton.jit
def _write_weight(
    values, tensors, at, W: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, rest, ROUNDS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Store four times an FP32 master, divided by the scale of its row, and the weight that is computed with."""
    if W[2] == 32:
        store(values, tensors[WEIGHT], at, 4, WHOLE)
    else:
        codes, low, random = (), (), _taken_apart(rest)
        for i in tl.static_range(4):
            if REMAINDER == 0:
                codes += (encode(values[i], W, random[i], ROUNDS),)
            else:
                bits = round_up(bits_of(values[i], W), DROPPED, random[i], ROUNDS)
                codes += (top_of(bits + (1 << (W[0] - 1)), W),)
                low += (bits << (32 - REMAINDER - DROPPED),)
        store(codes, tensors[WEIGHT], at, W[2] // 8, WHOLE)
        if REMAINDER != 0:
            store(low, tensors[MASTER], at, REMAINDER // 8, WHOLE)
