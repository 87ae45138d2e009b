"""Gradients of the optimizers, in FP32, BF16, FP16, or FP8 with scales: loads, FP8 storage, sums of squares."""

# mypy: disable-error-code=assignment
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.storage import GRADIENT_CODES, Scaling, Storage, groups_of
from octavo.kernels.storage import GROUP as SIZE
from octavo.kernels.storage.triton import (
    GROUP,
    NONE,
    TENSOR,
    as_bits,
    as_float,
    encode,
    inverse_of,
    packed,
    scale_code,
    scale_of,
    sign_of,
)
from octavo.kernels.triton.launch import Kernel
from octavo.kernels.triton.quads import (
    decoded,
    fetch,
    largest,
    largest_of_quads,
    load_bytes,
    quads_at,
    raise_to,
    store_bytes,
    tops,
)
from octavo.kernels.triton.quads import store as store_quads
from octavo.kernels.triton.shape import cdiv

WARPS = 4
"""Warps per program; each takes one group per iteration."""
STEPS = 8
SQUARES_STEPS = 32
"""Iterations per program."""

# Formats of a gradient; see `kind_of`.
FROM_FLOAT: tl.constexpr = tl.constexpr(0)
FROM_BF16: tl.constexpr = tl.constexpr(1)
FROM_HALF: tl.constexpr = tl.constexpr(2)
"""FP16, and E5M2, whose codes are the upper bytes of FP16's."""
FROM_E4M3: tl.constexpr = tl.constexpr(3)

_KINDS = {
    torch.float32: FROM_FLOAT,
    torch.bfloat16: FROM_BF16,
    torch.float16: FROM_HALF,
    torch.float8_e5m2: FROM_HALF,
    torch.float8_e4m3fn: FROM_E4M3,
}
E4M3: tl.constexpr = tl.constexpr(packed(Storage("e4m3")))
E5M2: tl.constexpr = tl.constexpr(packed(Storage("e5m2")))


def kind_of(dtype: torch.dtype, scaling: Scaling) -> tuple[int, int, int]:
    """Return KIND of such gradients: format, bytes per value, scaling."""
    return _KINDS[dtype].value, dtype.itemsize, {"none": NONE, "tensor": TENSOR, "group": GROUP}[scaling].value


def store_gradient(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    """See `octavo.kernels.optimizer.store_gradient`."""
    rows, cols = gradient.shape
    whole = cols % SIZE == 0 and all(t.data_ptr() % 16 == 0 for t in (gradient, codes))
    found = torch.zeros(1, dtype=torch.int32, device=gradient.device)  # the maximum of a tensor, as bits
    for search in (True, False) if scaling == "tensor" else (False,):
        _store_kernel[(cdiv(rows * groups_of(cols), WARPS * STEPS),)](
            gradient, codes, scale, found, rows, cols,
            FROM=kind_of(gradient.dtype, "none"), S=packed(Storage(GRADIENT_CODES[codes.dtype], scaling)),
            WHOLE=whole, TILE=WARPS, STEPS=STEPS, SEARCH=search, num_warps=WARPS,
        )  # fmt: skip


def squares(tensors: Sequence[Tensor], scales: Sequence[Tensor | None], uploads: PinnedStaging) -> Tensor:
    """See `octavo.kernels.optimizer.squares`."""
    kinds: dict[_Kind, list[int]] = {}
    for i, (tensor, scale) in enumerate(zip(tensors, scales, strict=True)):
        kinds.setdefault(_Kind.of(tensor, scale), []).append(i)
    order = tuple(i for own in kinds.values() for i in own)
    back = uploads(("squares", order), order, lambda: torch.tensor(order).argsort(), tensors[0].device)
    sums = [_squares(kind, [tensors[i] for i in own], [scales[i] for i in own], uploads) for kind, own in kinds.items()]
    return torch.cat(sums)[back]


class _Kind(NamedTuple):
    """Parameters shared by all tensors of a launch."""

    read: tuple[int, int, int]
    """See `kind_of`."""
    whole: bool

    @classmethod
    def of(cls, tensor: Tensor, scale: Tensor | None) -> _Kind:
        read = kind_of(tensor.dtype, "none" if scale is None else "tensor" if scale.shape == (1, 1) else "group")
        return cls(read, _matrix(tensor, scale)[1] % SIZE == 0 and tensor.data_ptr() % 16 == 0)


def _matrix(tensor: Tensor, scale: Tensor | None) -> tuple[int, int]:
    """Return rows and columns; one row without scales."""
    return (1, tensor.numel()) if scale is None else (tensor.shape[0], tensor.shape[1])


def _squares(kind: _Kind, tensors: Sequence[Tensor], scales: Sequence[Tensor | None], uploads: PinnedStaging) -> Tensor:
    device = tensors[0].device
    sizes = [_matrix(*pair) for pair in zip(tensors, scales, strict=True)]
    counts = [cdiv(rows * groups_of(cols), WARPS * SQUARES_STEPS) for rows, cols in sizes]
    starts = [0, *accumulate(counts)][:-1]
    rows = tuple(
        (*size, start, tensor.data_ptr(), 0 if scale is None else scale.data_ptr())
        for size, start, tensor, scale in zip(sizes, starts, tensors, scales, strict=True)
    )
    name = (kind, len(tensors), *sizes[0])
    lengths = uploads(("lengths", name), tuple(counts), lambda: torch.tensor(counts), device)
    places = uploads(("squares", name), rows, lambda: torch.tensor(rows, dtype=torch.int64), device)

    def owning() -> Tensor:
        return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))

    owners = uploads(("squares owners", name), tuple(counts), owning, device)
    sums = torch.empty(len(owners), dtype=torch.float64, device=device)
    if len(owners):
        _squares_kernel[(len(owners),)](
            places, owners, sums, KIND=kind.read, WHOLE=kind.whole, TILE=WARPS, STEPS=SQUARES_STEPS, num_warps=WARPS
        )
    return torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True)


@triton.jit
def values_of(top, KIND: tl.constexpr):
    """Decode gradients in the top bits of int32 to FP32; infinities and NaN are kept."""
    if KIND[0] == FROM_FLOAT:
        x = top
    elif KIND[0] == FROM_BF16:
        x = as_float(top & -65536)
    else:
        half = (top >> 16) if KIND[1] == 2 else (top >> 16) & 0xFF00
        x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def read_gradient(address, scale, at, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Load a gradient in FP32, as four tensors, 0 outside the matrix. scale: address of its scales."""
    return gradient_of(fetch_gradient(address, scale, at, KIND, WHOLE), KIND, WHOLE)


@triton.jit
def fetch_gradient(address, scale, at, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Load the raw words of a gradient and its scale codes."""
    code = 0
    if KIND[2] == GROUP:
        code = load_bytes(scale, at)
    elif KIND[2] == TENSOR:
        code = tl.load(scale.to(tl.pointer_type(tl.uint8))).to(tl.int32)
    return fetch(address, at, KIND[1], WHOLE), code


@triton.jit
def gradient_of(fetched, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Decode the result of `fetch_gradient` to FP32, as four tensors."""
    words, code = fetched
    if KIND[0] == FROM_E4M3:
        values = decoded(words, E4M3, WHOLE)
    else:
        a, b, c, d = tops(words, KIND[1], WHOLE)
        values = (values_of(a, KIND), values_of(b, KIND), values_of(c, KIND), values_of(d, KIND))
    if KIND[2] != NONE:
        scale = scale_of(code)
        values = (values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale)
    return values


@triton.jit
def groups_at(turn, rows, cols, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Position of iteration `turn`: TILE consecutive groups, across row ends."""
    group = turn * TILE + tl.arange(0, TILE)
    across = (cols + 127) // 128
    if WHOLE:
        at = quads_at(group * 0, group, 1, rows * across, cols, WHOLE)
    else:
        at = quads_at(group // across, group % across, rows, across, cols, WHOLE)
    return at


@Kernel
@triton.jit
def _squares_kernel(
    table, owners, sums, KIND: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr
):
    program = tl.program_id(0)
    row = table + 5 * tl.load(owners + program)
    rows, cols = tl.load(row), tl.load(row + 1)
    first = program - tl.load(row + 2).to(tl.int32)
    address, scale = tl.load(row + 3), tl.load(row + 4)
    total = tl.zeros((TILE, 32), tl.float64)
    for turn in range(STEPS):
        at = groups_at(first * STEPS + turn, rows, cols, WHOLE, TILE)
        values = read_gradient(address, scale, at, KIND, WHOLE)
        for i in tl.static_range(4):
            x = values[i].to(tl.float64)
            total += x * x
    tl.store(sums + program, tl.sum(tl.sum(total, axis=1), axis=0))


@Kernel
@triton.jit(do_not_specialize=["rows", "cols"])
def _store_kernel(
    gradient, codes, scale, found, rows, cols, FROM: tl.constexpr, S: tl.constexpr,
    WHOLE: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    common = 127
    if S[5] == TENSOR and not SEARCH:
        common = scale_code(tl.load(found), S[3])
        tl.store(scale, common.to(tl.uint8), mask=tl.program_id(0) == 0)
    running = tl.zeros((TILE, 32), tl.int32)
    for turn in range(STEPS):
        at = groups_at(tl.program_id(0) * STEPS + turn, rows, cols, WHOLE, TILE)
        values = read_gradient(gradient, scale, at, FROM, WHOLE)
        finite = (_finite(values[0]), _finite(values[1]), _finite(values[2]), _finite(values[3]))
        if SEARCH:
            running = tl.maximum(running, largest_of_quads(finite))
        else:
            exponent = common
            if S[5] == GROUP:
                exponent = scale_code(largest(finite), S[3])[:, None]
                store_bytes(exponent, scale, at)
            inverse = inverse_of(exponent)
            coded = ()
            for i in tl.static_range(4):
                coded += (_coded(values[i], finite[i] * inverse, S),)
            store_quads(coded, codes, at, 1, WHOLE)
    if SEARCH:
        raise_to(found, running)


@triton.jit
def _finite(x):
    """Replace infinities and NaN with 0."""
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, 0.0)


@triton.jit
def _coded(x, scaled, S: tl.constexpr):
    """Codes of scaled values, or of infinity and NaN where x has them; E4M3, without infinities, takes NaN for both."""
    INFINITY: tl.constexpr = 0x7C000000 if S[0] == E5M2[0] else 0x7F000000
    NAN: tl.constexpr = 0x7E000000 if S[0] == E5M2[0] else 0x7F000000
    top = tl.where(tl.abs(x) == float("inf"), INFINITY | sign_of(as_bits(x)), encode(scaled, S, 0, False))
    return tl.where(x == x, top, NAN)
