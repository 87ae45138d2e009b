"""One step of many tensors in one launch: a program takes some groups of one tensor, or one whole row.

Where a scale belongs to a whole tensor, there are two launches. The first only searches for the maxima, and sets aside
the scales of before: the second, one of whose programs may be done before another begins, writes over them.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.optimizer import Control, Layout, Slot
from octavo.kernels.storage import E4M3, FP32, GROUP, Storage, groups_of
from octavo.kernels.triton import storage as codec
from octavo.kernels.triton.storage import (
    as_bits,
    as_float,
    decode,
    encode,
    inverse_of,
    load_bits,
    load_float,
    round_off,
    scale_code,
    scale_of,
    store_bits,
    store_float,
)
from octavo.kernels.uploads import Uploads

TILE = 16
"""Groups a program takes."""
WARPS = 4
SQUARES = 4096
"""Values a program of `squares` takes at a time, and how often."""
SQUARES_STEPS = 4

_GRADIENT_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 0}
"""How a kernel reads them; FP16 by its own dtype."""
_RULES = {"adamw": 0, "adam": 1, "lion": 2}
ADAM: tl.constexpr = tl.constexpr(1)
LION: tl.constexpr = tl.constexpr(2)
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
WIDTH: tl.constexpr = tl.constexpr(13)
"""Columns of the table that says where each tensor lies."""

_ADDRESSES = WEIGHT.value
"""The first column of the table that holds an address."""
C: tl.constexpr = tl.constexpr(11)
"""Columns of the coefficients."""


def update(slots: Sequence[Slot], layout: Layout, control: Control, uploads: Uploads) -> None:
    """See `octavo.kernels.optimizer.update`."""
    slots = [slot for slot in slots if slot.weight.numel()]
    if not slots:
        return
    device, by_row = slots[0].weight.device, layout.weight == E4M3.dtype
    tile = triton.next_power_of_2(max(groups_of(slot.weight.shape[1]) for slot in slots)) if by_row else TILE
    places, owners, aligned = _tables(slots, layout, tile, by_row, uploads, device)
    even = all(slot.weight.shape[1] % GROUP == 0 for slot in slots)
    meta = {
        **_meta(layout), "EVEN": even, "ALIGNED": even and aligned,
        "BY_ROW": by_row, "TILE": tile, "num_warps": min(max(tile // 4, WARPS), 16), "enable_fp_fusion": False,
    }  # fmt: skip
    searches = any(s is not None and s.scaling == "tensor" for s in (layout.first, layout.second, layout.master))
    whole = torch.zeros(len(control.steps) if searches else 1, 6, dtype=torch.int32, device=device)
    for search in (True, False) if searches else (False,):
        _update_kernel[(len(owners),)](
            places, owners, control.coefficients, control.steps, control.skip, control.clamped, whole, control.seed,
            SEARCH=search, **meta,
        )  # fmt: skip


def _tables(
    slots: Sequence[Slot], layout: Layout, tile: int, by_row: bool, uploads: Uploads, device: torch.device
) -> tuple[Tensor, Tensor, bool]:
    """Return where each tensor lies, int64 (T, WIDTH), for each program its tensor and its row of `Control`, and
    whether all tensors begin at multiples of 16 bytes, so that a thread may load as many at once.
    """  # noqa: D205
    heights = [height if by_row else triton.cdiv(height * groups_of(width), tile) for height, width in _shapes(slots)]
    rows = tuple(
        (*slot.weight.shape, start, slot.number, *(0 if t is None else t.data_ptr() for t in slot[2:]))
        for slot, start in zip(slots, _starts(heights), strict=True)
    )
    numbers = tuple((place, slot.row) for place, slot in enumerate(slots))

    def owners() -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).repeat_interleave(torch.tensor(heights), dim=0)

    # The first of the slots tells apart what is stepped in turn: gradients that are released one by one.
    name = (layout, slots[0].number)
    places = uploads(("places", *name), rows, lambda: torch.tensor(rows, dtype=torch.int64), device)
    aligned = all(address % 16 == 0 for row in rows for address in row[_ADDRESSES:])
    return places, uploads(("owners", *name), (numbers, tuple(heights)), owners, device), aligned


def _shapes(slots: Sequence[Slot]) -> list[torch.Size]:
    return [slot.weight.shape for slot in slots]


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _meta(layout: Layout) -> dict[str, Any]:
    fmt, dropped = layout.split or (None, 0)
    plain = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", E4M3.dtype: "e4m3"}
    return {
        "RULE": _RULES[layout.rule],
        "W": _packed(Storage(plain[layout.weight])),
        "GRADIENT_BYTES": _GRADIENT_BYTES[layout.gradient],
        "FIRST": _packed(layout.first),
        "SECOND": None if layout.second is None else _packed(layout.second),
        "APART": None if layout.master is None else _packed(layout.master),
        "REMAINDER": layout.remainder_bits if fmt else 0,
        "DROPPED": dropped,
        "STOCHASTIC": layout.stochastic,
    }


def _packed(storage: Storage) -> tuple[Any, ...]:
    fmt = storage.float
    limit = struct.unpack("<i", struct.pack("<f", fmt.max))[0]
    scaling = {"none": codec.NONE, "tensor": codec.TENSOR, "group": codec.GROUP}[storage.scaling].value
    bits = 32 if fmt is FP32 else fmt.bits
    return (fmt.dropped, fmt.shift, bits, limit, fmt.signed, scaling, storage.root)


def squares(tensors: Sequence[Tensor], uploads: Uploads) -> Tensor:
    """See `octavo.kernels.optimizer.squares`: partial sums a program, then their sums a tensor."""
    device = tensors[0].device
    out = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = tuple(i for i, t in enumerate(tensors) if t.dtype == dtype and t.numel())
        if numbers:
            sums = _squares_of([tensors[i] for i in numbers], uploads, (dtype, numbers))
            where = uploads(("numbers", dtype, numbers), numbers, partial(torch.tensor, numbers), device)
            out.index_copy_(0, where, sums)
    return out


def _squares_of(tensors: Sequence[Tensor], uploads: Uploads, name: Hashable) -> Tensor:
    device, dtype = tensors[0].device, tensors[0].dtype
    counts = [triton.cdiv(t.numel(), SQUARES * SQUARES_STEPS) for t in tensors]
    rows = tuple((t.data_ptr(), t.numel(), start) for t, start in zip(tensors, _starts(counts), strict=True))
    lengths = uploads(("lengths", name), tuple(counts), partial(torch.tensor, counts), device)
    places = uploads(("squares", name), rows, partial(torch.tensor, rows, dtype=torch.int64), device)

    def owning() -> Tensor:
        return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))

    owners = uploads(("squares owners", name), tuple(counts), owning, device)
    sums = torch.empty(len(owners), dtype=torch.float64, device=device)
    _squares_kernel[(len(owners),)](
        places, owners, sums, BYTES=_GRADIENT_BYTES[dtype],
        ALIGNED=all(t.data_ptr() % 16 == 0 for t in tensors), SIZE=SQUARES, STEPS=SQUARES_STEPS, num_warps=8,
    )  # fmt: skip
    return torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True)


@triton.jit
def _squares_kernel(
    table, owners, partial, BYTES: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr
):
    program = tl.program_id(0)
    row = table + 3 * tl.load(owners + program)
    address, count, first = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    start = (program - first) * SIZE * STEPS
    total = tl.zeros((SIZE,), tl.float64)
    for step in tl.static_range(STEPS):
        index = start + step * SIZE + tl.arange(0, SIZE)
        g = _gradient(address, index, index < count, BYTES, ALIGNED).to(tl.float64)
        total += g * g
    tl.store(partial + program, tl.sum(total, axis=0))


@triton.jit
def _gradient(address, index, there, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    if BYTES == 4:
        g = load_float(address, index, there, ALIGNED)
    elif BYTES == 2:
        g = as_float(load_bits(address, index, there, 2, ALIGNED) << 16)
    else:
        g = tl.load(address.to(tl.pointer_type(tl.float16)) + index, mask=there, other=0.0).to(tl.float32)
    return g


@triton.jit
def _update_kernel(
    table, owners, coefficients, steps, skip, clamped, whole, seed,
    RULE: tl.constexpr, W: tl.constexpr, GRADIENT_BYTES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, BY_ROW: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = table + WIDTH * tl.load(owners + 2 * program)
    slot = tl.load(owners + 2 * program + 1)
    amax = whole + 6 * slot  # three maxima, as bits, and the three scales of before
    c = coefficients + C * slot
    group, index, there, group_there = _where(row, program, tl.load(skip) == 0, EVEN, BY_ROW, TILE)

    w = _read_weight(
        row, index, there, W, APART, REMAINDER, DROPPED, ALIGNED, group, group_there, amax + 5, BY_ROW, SEARCH
    )
    g = _gradient(tl.load(row + GRADIENT), index, there, GRADIENT_BYTES, ALIGNED) * tl.load(c)
    m = _read(row, M, M_SCALE, amax + 3, group, group_there, index, there, FIRST, ALIGNED, SEARCH)
    if RULE == LION:
        difference = g - m
        u = m + tl.load(c + 1) * difference
        u = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, u * 0.0))
        m = m + tl.load(c + 3) * difference
    else:
        v = _read(row, V, V_SCALE, amax + 4, group, group_there, index, there, SECOND, ALIGNED, SEARCH)
        if RULE == ADAM:
            g = g + tl.load(c + 9) * w
        m = m + tl.load(c + 1) * (g - m)
        v = tl.minimum(v * tl.load(c + 2) + tl.load(c + 3) * (g * g), 3.4028234663852886e38)
        root = tl.sqrt_rn(v)
        u = tl.div_rn(m * tl.load(c + 4), root * tl.load(c + 5) + tl.load(c + 6))
    limit = tl.load(c + 10)
    held = tl.sum((there & (tl.abs(u) > limit)).to(tl.int32))
    w = w * tl.load(c + 8) - tl.load(c + 7) * tl.minimum(tl.maximum(u, -limit), limit)
    if not SEARCH and held > 0:
        tl.atomic_add(clamped, held.to(tl.int64), sem="relaxed")

    random_m, random_v, random_w = None, None, None
    if STOCHASTIC and not SEARCH:
        word = _words(seed, group, tl.load(row + NUMBER), tl.load(steps + slot), TILE)
        random_m = (word & 0xFFFF).to(tl.int32)
        random_v = (word >> 16).to(tl.int32)
        random_w = ((word * 0x9E3779B9) >> 16).to(tl.int32)
    _write(m, row, M, M_SCALE, amax, group, group_there, index, there, FIRST, random_m, ALIGNED, SEARCH)
    if RULE != LION:
        if SECOND[6]:
            v = root
        _write(v, row, V, V_SCALE, amax + 1, group, group_there, index, there, SECOND, random_v, ALIGNED, SEARCH)
    if APART is not None:
        w = _write(
            tl.where(there, w, 0.0),
            row,
            MASTER,
            MASTER_SCALE,
            amax + 2,
            group,
            group_there,
            index,
            there,
            APART,
            random_w,
            ALIGNED,
            SEARCH,
        )
        random_w = None
    if not SEARCH:
        _write_weight(w, row, group, index, there, W, REMAINDER, DROPPED, random_w, ALIGNED, BY_ROW)


@triton.jit
def _where(row, program, runs, EVEN: tl.constexpr, BY_ROW: tl.constexpr, TILE: tl.constexpr):
    """Which groups a program has, int64 (TILE); the indices of their values (TILE, 128); what of both there is."""
    rows, cols = tl.load(row + ROWS), tl.load(row + COLUMNS)
    local = program - tl.load(row + FIRST_PROGRAM)
    lane = tl.arange(0, 128)[None, :]
    across = (cols + 127) // 128
    if BY_ROW:
        column = tl.arange(0, TILE)
        group = local * across + column
        group_there = (column < across) & runs
    else:
        group = local * TILE + tl.arange(0, TILE)
        group_there = (group < rows * across) & runs
    if EVEN:
        index = group[:, None] * 128 + lane
        there = group_there[:, None] & (lane < 128)
    else:
        inside = (group % across)[:, None] * 128 + lane
        index = (group // across)[:, None] * cols + inside
        there = group_there[:, None] & (inside < cols)
    return group, index, there, group_there


@triton.jit
def _words(seed, group, number, step, TILE: tl.constexpr):
    """32 random bits a value, uint32 (TILE, 128): word i % 4 of the counter i / 4."""
    counter = (group[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.uint32)
    zero = counter * 0
    c1 = zero + number.to(tl.uint32)
    c2 = zero + step.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, c1, c2, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE, 128))


@triton.jit
def _read(
    row, CODES: tl.constexpr, SCALE: tl.constexpr, before, group, group_there, index, there, S: tl.constexpr,
    ALIGNED: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """FP32 values of stored ones; S: their storage."""
    address = tl.load(row + CODES)
    if S[2] == 32:
        x = load_float(address, index, there, ALIGNED)
    else:
        BYTES: tl.constexpr = S[2] // 8
        x = decode(load_bits(address, index, there, BYTES, ALIGNED), S)
    if S[5] != 0:
        scale = tl.load(row + SCALE).to(tl.pointer_type(tl.uint8))
        if S[5] == 2:
            x = x * scale_of(tl.load(scale + group, mask=group_there, other=0).to(tl.int32))[:, None]
        elif SEARCH:
            exponent = tl.load(scale).to(tl.int32)
            tl.store(before, exponent)
            x = x * scale_of(exponent)
        else:
            x = x * scale_of(tl.load(before))
    if S[6]:
        x = x * x
    return x


@triton.jit
def _write(
    x, row, CODES: tl.constexpr, SCALE: tl.constexpr, amax, group, group_there, index, there, S: tl.constexpr, random,
    ALIGNED: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Store FP32 values, roots already taken, and return what was stored; or only search for their maximum.

    x is 0 where there is nothing, as all that it was computed from is.
    """
    y = x
    if S[5] == 1 and SEARCH:
        largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
        tl.atomic_max(amax, as_bits(largest), sem="relaxed")
    elif not SEARCH:
        if S[5] == 1:
            exponent = scale_code(as_float(tl.load(amax)), S[3])
            where = tl.load(row + SCALE).to(tl.pointer_type(tl.uint8))
            tl.store(where, exponent.to(tl.uint8), mask=tl.max(tl.max(there.to(tl.int32), axis=1), axis=0) > 0)
        elif S[5] == 2:
            exponent = scale_code(tl.max(tl.abs(x), axis=1), S[3])
            where = tl.load(row + SCALE).to(tl.pointer_type(tl.uint8))
            tl.store(where + group, exponent.to(tl.uint8), mask=group_there)
            exponent = exponent[:, None]
        if S[5] != 0:
            x = x * inverse_of(exponent)
        address = tl.load(row + CODES)
        if S[2] == 32:
            store_float(x, address, index, there, ALIGNED)
        else:
            BYTES: tl.constexpr = S[2] // 8
            code = encode(x, S, random)
            store_bits(code, address, index, there, BYTES, ALIGNED)
            y = decode(code, S)
            if S[5] != 0:
                y = y * scale_of(exponent)
    return y


@triton.jit
def _read_weight(
    row, index, there, W: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    ALIGNED: tl.constexpr, group, group_there, before, BY_ROW: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The FP32 master."""
    if APART is not None:
        w = _read(row, MASTER, MASTER_SCALE, before, group, group_there, index, there, APART, ALIGNED, SEARCH)
    elif W[2] == 32:
        w = load_float(tl.load(row + WEIGHT), index, there, ALIGNED)
    else:
        SIGN_AT: tl.constexpr = W[2] - 1
        BYTES: tl.constexpr = W[2] // 8
        code = load_bits(tl.load(row + WEIGHT), index, there, BYTES, ALIGNED)
        if REMAINDER == 0:
            w = decode(code, W)
        else:
            LOW_BYTES: tl.constexpr = REMAINDER // 8
            low = load_bits(tl.load(row + MASTER), index, there, LOW_BYTES, ALIGNED)
            low = (low << (32 - REMAINDER)) >> (32 - REMAINDER)
            magnitude = (((code & ((1 << SIGN_AT) - 1)) << REMAINDER) + low) << DROPPED
            w = as_float(magnitude | ((code >> SIGN_AT) << 31)) * (1.0 / W[1])
        if BY_ROW:
            w = w * tl.load(_row_scale(row))
    return w


@triton.jit
def _row_scale(row):
    return tl.load(row + WEIGHT_SCALE).to(tl.pointer_type(tl.float32)) + tl.program_id(0) - tl.load(row + FIRST_PROGRAM)


@triton.jit
def _write_weight(
    w, row, group, index, there, W: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, random,
    ALIGNED: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Store an FP32 master, and the weight that is computed with."""
    if BY_ROW:
        exponent = scale_code(tl.max(tl.max(tl.where(there, tl.abs(w), 0.0), axis=1), axis=0), W[3])
        tl.store(_row_scale(row), scale_of(exponent), mask=tl.max(tl.max(there.to(tl.int32), axis=1), axis=0) > 0)
        w = w * inverse_of(exponent)
    address = tl.load(row + WEIGHT)
    BYTES: tl.constexpr = W[2] // 8
    if W[2] == 32:
        store_float(w, address, index, there, ALIGNED)
    elif REMAINDER == 0:
        store_bits(encode(w, W, random), address, index, there, BYTES, ALIGNED)
    else:
        LOW_BYTES: tl.constexpr = REMAINDER // 8
        SIGN_AT: tl.constexpr = W[2] - 1
        bits = as_bits(w * W[1])
        kept = round_off(bits & 0x7FFFFFFF, DROPPED, random)
        high = (kept + (1 << (REMAINDER - 1))) >> REMAINDER
        store_bits(high | (((bits >> 31) & 1) << SIGN_AT), address, index, there, BYTES, ALIGNED)
        store_bits(kept - (high << REMAINDER), tl.load(row + MASTER), index, there, LOW_BYTES, ALIGNED)
