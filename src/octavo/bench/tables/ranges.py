"""The tables of which magnitudes a scale should hold, from the formats and the limits of `octavo.calibration`."""

from __future__ import annotations

import math

from octavo.bench.tables.markdown import table
from octavo.calibration.scale_policy import FINER, FLUSHED, SATURATED
from octavo.kernels.sample import limits
from octavo.numerics import E4M3, E5M2, Format
from octavo.recipes.spec import MOST_MARGIN

DECADES = 4
"""Orders of magnitude below the largest value that a margin should leave at full precision."""


def range_table() -> str:
    """Return what each format holds, and what is recommended of a tensor's largest magnitude."""
    titles = ("full precision", "in all")
    header = ("format", "largest", "smallest normal", "smallest", "zero up to", *titles, "margin", "amax / scale")
    return table(header, [_row(fmt) for fmt in (E4M3, E5M2)])


def _row(fmt: Format) -> tuple[str, ...]:
    margin = most_margin(fmt)
    powers = (fmt.smallest_normal, fmt.smallest_subnormal, limits(fmt).flushed)
    decades = (f"{math.log10(fmt.max / least):.1f} decades" for least in powers[:2])
    shown = (f"2^{round(math.log2(power))}" for power in powers)
    room = f"{fmt.max / 2**margin:g} to {fmt.max:g}"
    return (fmt.name.upper(), f"{fmt.max:g}", *shown, *decades, f"0 to {margin} bits", room)


def most_margin(fmt: Format) -> int:
    """Return the most bits of headroom that leave `DECADES` at full precision below a tensor's largest value."""
    return min(MOST_MARGIN, int(math.log2(fmt.max / fmt.smallest_normal) - DECADES * math.log2(10)))


def column_table() -> str:
    """Return the columns of what `octavo calibrate` prints, with the limits that it holds scales against."""
    rows = [
        ("scales that fit", f"from that of the choice without its margin, to where {_percent(FLUSHED)} is flushed"),
        ("spare bits", "between the two; negative: none fits"),
        ("flushed", f"share of all elements that is not zero and whose code is; fits up to {_percent(FLUSHED)}"),
        ("saturated", f"share of all elements past the largest code; fits up to {_percent(SATURATED)}"),
        ("suggested", f"`e4m3` if any scale fits in it, else `e5m2`, else `{FINER}`: one a row or a tile"),
    ]
    return table(("column", "meaning"), rows)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
