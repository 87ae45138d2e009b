"""One tile of an optimizer step: load, update rule, store.

Results equal `reference.py` bit for bit. Values are tuples of four tensors, as in `quads`.
"""

# mypy: disable-error-code="assignment,var-annotated"
# Tuples grow in loops that Triton unrolls; to mypy, their type changes.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from octavo.kernels.gradient.triton import fetch_gradient, gradient_of
from octavo.kernels.storage.triton import (
    as_bits,
    as_float,
    bits_of,
    encode,
    encoded,
    inverse_of,
    magnitude_of,
    round_up,
    rounded,
    scale_code,
    scale_of,
    sign_of,
    top_of,
)
from octavo.kernels.triton.codes import INTERPRETED
from octavo.kernels.triton.quads import (
    decoded,
    fetch,
    largest,
    largest_of_quads,
    load_bytes,
    store,
    store_bytes,
    tops,
    words,
)

ADAM: tl.constexpr = tl.constexpr(1)
LION: tl.constexpr = tl.constexpr(2)
GIVEN: tl.constexpr = tl.constexpr(3)
MOMENTUM: tl.constexpr = tl.constexpr(4)

# Columns of the tensor table: sizes, addresses of the tensors of a `Slot`, address of the update.
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
"""Number of columns."""


@triton.jit
def read_tile(
    tensors, at, RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    APART: tl.constexpr, REMAINDER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load the raw words of gradient, first and second moment, weight, and remainder or separate master."""
    m, v, w, low = (0, 0), (0, 0), 0, (0, 0)
    if RULE != GIVEN:
        m = _fetch_stored(tensors[M], tensors[M_SCALE], at, FIRST, WHOLE)
    if SECOND is not None:
        v = _fetch_stored(tensors[V], tensors[V_SCALE], at, SECOND, WHOLE)
    if APART is not None:
        low = _fetch_stored(tensors[MASTER], tensors[MASTER_SCALE], at, APART, WHOLE)
    elif RULE != MOMENTUM:
        w = fetch(tensors[WEIGHT], at, W[2] // 8, WHOLE)
        if REMAINDER != 0:
            low = (fetch(tensors[MASTER], at, REMAINDER // 8, WHOLE), 0)
    return fetch_gradient(tensors[GRADIENT], tensors[GRADIENT_SCALE], at, KIND, WHOLE), m, v, w, low


@triton.jit
def _fetch_stored(address, scale, at, S: tl.constexpr, WHOLE: tl.constexpr):
    """Raw words and the codes of their group scales, 0 without group scales."""
    code = 0
    if S[5] == 2:
        code = load_bytes(scale, at)
    return fetch(address, at, S[2] // 8, WHOLE), code


@triton.jit
def advance(
    fetched, c, scales, weight_scale, RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """New FP32 weights, first moments, second moments (roots, if stored as roots); and clamped updates per quad."""
    num_clamped = 0.0
    if RULE == MOMENTUM:
        new_m, _ = new_momentum(fetched, c, scales, KIND, FIRST, WHOLE)
        new_w, new_v = new_m, new_m
    else:
        g = gradient_of(fetched[0], KIND, WHOLE)
        m, v = g, g
        if RULE != GIVEN:
            m = _values(fetched[1], scales[0], FIRST, WHOLE)
        if SECOND is not None:
            v = _values(fetched[2], scales[1], SECOND, WHOLE)
        w = _weights(fetched[3], fetched[4], scales[2], weight_scale, W, APART, REMAINDER, DROPPED, WHOLE)
        new_w, new_m, new_v = (), (), ()
        for i in tl.static_range(4):
            x, m_i, v_i, root, u = _rule(w[i], g[i] * c[0], m[i], v[i], c, RULE)
            limit = c[10]
            num_clamped += tl.where(tl.abs(u) > limit, 1.0, 0.0)  # padding has no update
            u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
            u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
            new_w += (x - c[7] * u,)
            new_m += (m_i,)
            if SECOND is not None:
                new_v += (root if SECOND[6] else v_i,)
    return new_w, new_m, new_v, num_clamped


@triton.jit
def new_momentum(fetched, c, scales, KIND: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr):
    """New momentum and scaled gradients."""
    g = gradient_of(fetched[0], KIND, WHOLE)
    m = _values(fetched[1], scales[0], FIRST, WHOLE)
    g = (g[0] * c[0], g[1] * c[0], g[2] * c[0], g[3] * c[0])
    return (m[0] * c[11] + g[0], m[1] * c[11] + g[1], m[2] * c[11] + g[2], m[3] * c[11] + g[3]), g


@triton.jit
def step_tile(
    fetched, tensors, at, c, scales, seed, step, weight_scale, RULE: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Step one tile and store everything but the weight.

    Returns the new FP32 weights, the random bits to round them with, and the number of clamped updates per quad.
    """
    new_w, new_m, new_v, num_clamped = advance(
        fetched, c, scales, weight_scale, RULE, W, KIND, FIRST, SECOND, APART, REMAINDER, DROPPED, WHOLE
    )
    random = words(seed, at[0], tensors[NUMBER], step)
    weight_bits = _weight_bits(random)
    if RULE != GIVEN:
        write_stored(new_m, tensors[M], tensors[M_SCALE], scales[3], at, FIRST, low_bits(random), STOCHASTIC, WHOLE)
    if SECOND is not None:
        write_stored(new_v, tensors[V], tensors[V_SCALE], scales[4], at, SECOND, _high_bits(random), STOCHASTIC, WHOLE)
    if APART is not None:
        new_w = write_stored(
            new_w, tensors[MASTER], tensors[MASTER_SCALE], scales[5], at, APART, _unpack_bits(weight_bits), STOCHASTIC,
            WHOLE,
        )  # fmt: skip
    return new_w, weight_bits, num_clamped


@triton.jit
def _rule(w, g, m, v, c, RULE: tl.constexpr):
    """Decayed weight before its update, both moments, root of the second moment, and update."""
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
        v = tl.minimum(v * c[2] + c[3] * (g * g), LARGEST, propagate_nan=tl.PropagateNan.ALL)
        root = _root(v)
        divisor = tl.maximum(root * c[5] + c[6], LEAST_DIVISOR, propagate_nan=tl.PropagateNan.ALL)
        u = _quotient(m * c[4], divisor)
    return w * c[8], m, v, root, u


LARGEST: tl.constexpr = tl.constexpr(3.3895313892515355e38)
"""BF16's largest value, the bound of a second moment."""
TINY: tl.constexpr = tl.constexpr(2.0**-100)
"""Smallest operand for which the correctly rounded sequences below have enough bits."""
LEAST_DIVISOR: tl.constexpr = tl.constexpr(2.0**-70)
"""Smallest divisor of an update, see `storage/reference.py`."""


@triton.jit
def _root(x):
    """Correctly rounded square root of x >= 0."""
    if INTERPRETED:
        root = tl.sqrt_rn(x)
    else:
        root = tl.inline_asm_elementwise(ROOT, "=f,f", [x], tl.float32, True, 1)
    return root


@triton.jit
def _quotient(x, by):
    """Correctly rounded x / by, for by >= LEAST_DIVISOR; 0 if |x| < TINY, NaN on overflow."""
    if INTERPRETED:
        quotient = tl.div_rn(x, by)
        quotient = tl.where(tl.abs(quotient) == float("inf"), float("nan"), quotient)
    else:
        quotient = tl.inline_asm_elementwise(QUOTIENT, "=f,f,f", [x, by], tl.float32, True, 1)
    return tl.where(tl.abs(x) < TINY, 0.0, quotient)


# Estimate and residual correction: the compiler's own sequences without their branch to rare cases. For a root, an
# operand below TINY is multiplied by 2^64 and the result by 2^-32, which is exact; the estimate for 0 is that for TINY,
# which is finite, so that the root is 0.
ROOT: tl.constexpr = tl.constexpr("""{
    .reg .f32 x, near, half, root, minus, rest;
    .reg .pred small;
    setp.lt.f32 small, $1, 0f0D800000;
    mov.f32 x, $1;
    @small mul.rn.f32 x, x, 0f5F800000;
    max.f32 near, x, 0f0D800000;
    rsqrt.approx.ftz.f32 near, near;
    mul.rn.f32 root, x, near;
    mul.rn.f32 half, near, 0f3F000000;
    neg.f32 minus, root;
    fma.rn.f32 rest, minus, root, x;
    fma.rn.f32 root, rest, half, root;
    @small mul.rn.f32 root, root, 0f2F800000;
    mov.f32 $0, root;
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
def low_bits(words):
    """Random bits for the first moment."""
    return (_int(words[0] & 0xFFFF), _int(words[1] & 0xFFFF), _int(words[2] & 0xFFFF), _int(words[3] & 0xFFFF))


@triton.jit
def _high_bits(words):
    """Random bits for the second moment."""
    return (_int(words[0] >> 16), _int(words[1] >> 16), _int(words[2] >> 16), _int(words[3] >> 16))


@triton.jit
def _weight_bits(words):
    """Random bits for the weight, two per word to save registers: per-row scales need them until the row ends."""
    factor = tl.full((), 0x9E3779B9, tl.uint32)
    first = ((words[0] * factor) >> 16) | ((words[1] * factor) & 0xFFFF0000)
    return first, ((words[2] * factor) >> 16) | ((words[3] * factor) & 0xFFFF0000)


@triton.jit
def _unpack_bits(words):
    return _int(words[0] & 0xFFFF), _int(words[0] >> 16), _int(words[1] & 0xFFFF), _int(words[1] >> 16)


@triton.jit
def _int(word):
    return word.to(tl.int32)


@triton.jit
def to_bf16(x):
    """Round FP32 to the nearest BF16, ties to even, in the top bits of int32; NaN stays NaN."""
    bits = round_up(as_bits(x), 16, 0, False)
    return tl.where(x == x, bits, 0x7FC00000)


@triton.constexpr_function
def has_one_scale(storage: tuple[Any, ...] | None) -> bool:
    """Return whether a storage has one scale per tensor."""
    return storage is not None and storage[5] == 1


@triton.jit
def set_aside(scale, before, first, S: tl.constexpr):
    """Save the scale of a tensor, which the step overwrites, and return it in FP32; 1 without one."""
    by = 1.0
    if has_one_scale(S):
        code = tl.load(scale.to(tl.pointer_type(tl.uint8))).to(tl.int32)
        tl.store(before, code, mask=first == 0)
        by = scale_of(code)
    return by


@triton.jit
def tensor_scales(tensors, amax, first, FIRST: tl.constexpr, SECOND: tl.constexpr, APART: tl.constexpr):
    """Old FP32 scales of first moment, second moment and master, then the codes of their new scales."""
    m, new_m = _new_scale(tensors[M_SCALE], amax, first, FIRST)
    v, new_v = _new_scale(tensors[V_SCALE], amax + 1, first, SECOND)
    w, new_w = _new_scale(tensors[MASTER_SCALE], amax + 2, first, APART)
    return m, v, w, new_m, new_v, new_w


@triton.jit
def _new_scale(scale, amax, first, S: tl.constexpr):
    by, code = 1.0, 127
    if has_one_scale(S):
        by = scale_of(tl.load(amax + 3))
        code = scale_code(tl.load(amax), S[3])
        tl.store(scale.to(tl.pointer_type(tl.uint8)), code.to(tl.uint8), mask=first == 0)
    return by, code


@triton.jit
def largest_found(values, S: tl.constexpr):
    """Bits of the largest magnitude per quad for storage with one scale per tensor, else 0."""
    found = 0
    if has_one_scale(S):
        found = largest_of_quads(values)
    return found


@triton.jit
def _values(fetched, scale, S: tl.constexpr, WHOLE: tl.constexpr):
    """Dequantise stored values to FP32. scale: per-tensor scale."""
    words, code = fetched
    values = decoded(words, S, WHOLE)
    if S[5] == 2:
        scale = scale_of(code)
    read = ()
    for i in tl.static_range(4):
        x = values[i]
        if S[5] != 0:
            x = x * scale
        read += (x * x if S[6] else x,)
    return read


@triton.jit
def write_stored(
    values, address, scale, exponent, at, S: tl.constexpr, random, ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantise and store FP32 values, roots already taken; return the stored values in FP32.

    Padding is 0, like every operand it was computed from. exponent: code of the per-tensor scale.
    """
    inverse, by = 1.0, 1.0
    if S[5] != 0:
        if S[5] == 2:
            exponent = scale_code(largest(values), S[3])[:, None]
            store_bytes(exponent, scale, at)
        inverse, by = inverse_of(exponent), scale_of(exponent)
    codes, stored = (), ()
    for i in tl.static_range(4):
        x = values[i]
        if S[5] != 0:
            x = x * inverse
        if S[2] != 32:
            bits = encoded(x, S, random[i], ROUNDS)
            codes += (top_of(bits, S),)
            x = rounded(bits, S)
        else:
            codes += (x,)
        if S[5] != 0:
            x = x * by
        stored += (tl.where(values[i] == values[i], x, values[i]),)
    store(codes, address, at, S[2] // 8, WHOLE)
    return stored


@triton.jit
def _weights(
    words, low, scale, row_scale, W: tl.constexpr, APART: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Decode the FP32 master. scale: per-tensor scale of a separate master; row_scale: per-row scales, or None."""
    if APART is not None:
        read = _values(low, scale, APART, WHOLE)
    else:
        if REMAINDER == 0:
            values = decoded(words, W, WHOLE)
        else:
            values = tops(words, W[2] // 8, WHOLE)
            remainder = tops(low[0], REMAINDER // 8, WHOLE)
        read = ()
        for i in tl.static_range(4):
            w = values[i]
            if REMAINDER != 0:
                magnitude = magnitude_of(w, W) + ((remainder[i] >> (32 - REMAINDER)) << DROPPED)
                w = as_float(tl.maximum(magnitude, 0) | sign_of(w)) * (1.0 / W[1])
            if row_scale is not None:
                w = w * row_scale
            read += (w,)
    return read


@triton.jit
def write_weight(
    values, tensors, at, W: tl.constexpr, REMAINDER: tl.constexpr, DROPPED: tl.constexpr, weight_bits,
    ROUNDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Store the weight, and the remainder of its master. values: FP32 master, divided by its row scale."""
    if W[2] == 32:
        store(values, tensors[WEIGHT], at, 4, WHOLE)
    else:
        codes, low, random = (), (), _unpack_bits(weight_bits)
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
