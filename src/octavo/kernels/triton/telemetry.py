"""What quantising loses, counted in the pass that quantises: see `octavo.kernels.telemetry`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count(x, y, stats_ptr, FORMAT: tl.constexpr):
    """Count the elements of a tile. x: FP32, 0 outside the matrix; y: x as it is rounded to codes."""
    _enter(*_tally(x, y, FORMAT), stats_ptr)


@triton.jit
def count_quarters(x, y, stats_ptr, FORMAT: tl.constexpr):
    """`count` of a tile that is worked on in quarters."""
    m0, f0, s0, n0 = _tally(x[0], y[0], FORMAT)
    m1, f1, s1, n1 = _tally(x[1], y[1], FORMAT)
    m2, f2, s2, n2 = _tally(x[2], y[2], FORMAT)
    m3, f3, s3, n3 = _tally(x[3], y[3], FORMAT)
    largest = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
    _enter(largest, f0 + f1 + f2 + f3, s0 + s1 + s2 + s3, n0 + n1 + n2 + n3, stats_ptr)


@triton.jit
def _tally(x, y, FORMAT: tl.constexpr):
    """(magnitude, flushed, saturated, non-finite) of each element: 0 if it is not finite, and three times 0 or 1."""
    # Half the smallest code rounds to 0; half a step past the largest is where rounding ends and saturation begins.
    FLUSHED: tl.constexpr = 2.0**-10 if tl.float8e4nv == FORMAT else 2.0**-17
    LARGEST: tl.constexpr = 464.0 if tl.float8e4nv == FORMAT else 61440.0
    magnitude = tl.abs(x)
    finite = magnitude < float("inf")
    flushed = finite & (magnitude > 0.0) & (tl.abs(y) <= FLUSHED)
    saturated = finite & (tl.abs(y) > LARGEST)
    non_finite = tl.where(finite, 0, 1)
    return tl.where(finite, magnitude, 0.0), flushed.to(tl.int32), saturated.to(tl.int32), non_finite


@triton.jit
def _enter(magnitude, flushed, saturated, non_finite, stats_ptr):
    """Add up what a program has found. Nothing is written where nothing changes: thousands of programs share this."""
    largest = tl.max(magnitude).to(tl.int32, bitcast=True).to(tl.int64)  # ordered as the values are
    tl.atomic_max(stats_ptr, largest, mask=largest > tl.load(stats_ptr), sem="relaxed")
    lost = tl.sum(flushed).to(tl.int64)
    tl.atomic_add(stats_ptr + 1, lost, mask=lost > 0, sem="relaxed")
    cut = tl.sum(saturated).to(tl.int64)
    tl.atomic_add(stats_ptr + 2, cut, mask=cut > 0, sem="relaxed")
    broken = tl.sum(non_finite).to(tl.int64)
    tl.atomic_add(stats_ptr + 3, broken, mask=broken > 0, sem="relaxed")
