"""Spread of final losses, and cost of narrow intervals: tables of the pilot and of the runs so far.

Runs of a block differ by recipe and by chaos. Their spread, pooled over all arms, is an upper bound of that of chaos,
estimated from many more runs than there are controls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

from octavo_bench.ladder import AIM, ALL, LOSSES, MARGIN, blocks, gaps, pairs_for, read_rows, studies
from octavo_bench.lanes import CONTROL
from octavo_bench.render import table
from octavo_bench.results import Row

Measure = Callable[[Row], float]
POINTS_LAST = 8
"""Points of the last fifth, of the 40 of a stored curve."""


def finite_blocks(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the runs of each block that stayed finite, if there are at least two."""
    found = ([row for row in block.values() if "error" not in row] for block in blocks(rows))
    return [block for block in found if len(block) > 1]


def deviations(rows: Sequence[Row], measure: Measure) -> list[list[float]]:
    """Return the deviations of the logarithm of a measure from its block's mean, per block."""
    found = []
    for block in finite_blocks(rows):
        own = [math.log(measure(row)) for row in block]
        found.append([value - fmean(own) for value in own])
    return found


def spread(groups: Sequence[Sequence[float]], fitted: int = 0) -> float:
    """Return the standard deviation within groups, in percent; `fitted` parameters were fitted besides the means."""
    freedom = sum(len(group) - 1 for group in groups) - fitted
    return 100 * math.sqrt(sum(value**2 for group in groups for value in group) / freedom)


def spread_over_time(rows: Sequence[Row]) -> list[float]:
    """Return the spread within blocks at each point of the curves, in percent."""
    points = len(finite_blocks(rows)[0][0]["training_loss"])
    return [spread(deviations(rows, partial(training_loss_at, at))) for at in range(points)]


def since_half(rows: Sequence[Row], measure: Measure) -> float:
    """Return the residual spread of a measure, unexplained by the difference at half of the run, in percent.

    Computed by a regression within blocks on the mean of the two points before half of the run.
    """
    half = len(finite_blocks(rows)[0][0]["training_loss"]) // 2
    before = deviations(rows, lambda row: fmean(row["training_loss"][half - 2 : half]))
    after = deviations(rows, measure)
    pairs = [(x, y) for xs, ys in zip(before, after, strict=True) for x, y in zip(xs, ys, strict=True)]
    slope = sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)
    rest = [[y - slope * x for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(before, after, strict=True)]
    return spread(rest, fitted=1)


def last_fifth(row: Row) -> float:
    """Return the training loss over the last fifth of a run, from its curve."""
    return fmean(row["training_loss"][-POINTS_LAST:])


def heldout(row: Row) -> float:
    """Return the held-out loss."""
    return float(row["heldout_loss"])


def heldout_in(language: str, row: Row) -> float:
    """Return the held-out loss of a language."""
    return float(row["by_language"][language])


def training_loss_at(point: int, row: Row) -> float:
    """Return a point of the stored curve of training loss."""
    return float(row["training_loss"][point])


MEASURES: dict[str, Measure] = {
    "held-out loss": heldout,
    **{f"held-out loss, {name}": partial(heldout_in, name) for name in ("python", "c++", "english", "other")},
    "training loss, last 20th": lambda row: fmean(row["training_loss"][-2:]),
    "training loss, last fifth": last_fifth,
    "training loss, last half": lambda row: fmean(row["training_loss"][-20:]),
}


def pilot_table(directory: Path) -> str:
    """Return the spreads of the pilot's runs by measure; empty without a pilot."""
    sizes = studies(read_rows(directory, pilot=True))
    if not sizes:
        return ""
    body = []
    for name, measure in MEASURES.items():
        cells = [f"{spread(deviations(own, measure)):.2f} %" for own in sizes]
        body.append((name, *cells, *(f"{since_half(own, measure):.2f} %" for own in sizes)))
    at = [("after a tenth", 3), ("after three tenths", 11), ("half-way", 19), ("at the end", 39)]
    for name, point in at:
        cells = [f"{spread_over_time(own)[point]:.2f} %" for own in sizes]
        body.append((f"training loss {name}", *cells, *[""] * len(sizes)))
    models = [own[0]["model"] for own in sizes]
    header = ("measure", *(f"{m}: SD" for m in models), *(f"{m}: residual SD" for m in models))
    return table(header, body)


def cost_table(directory: Path) -> str:
    """Return the GPU hours until intervals are narrow, by study and measure; empty without blocks."""
    body = []
    for own in studies(read_rows(directory, pilot=True)):
        seconds, arms = seconds_per_block(own), max(len(block) for block in finite_blocks(own))
        half = seconds * (1 + (arms - 1) / 2) / arms
        for name, measure in (("held-out loss", heldout), (LOSSES["fresh_loss"], last_fifth)):
            pair = math.sqrt(1.5) * spread(deviations(own, measure))  # a run minus the mean of two BF16 runs
            body.append(_cost(f"pilot, {own[0]['model']}, whole", name, seconds, pair))
            later = math.sqrt(1.5) * since_half(own, measure)
            body.append(_cost(f"expected, {own[0]['model']}, half", name, half, later))
    for own in studies(read_rows(directory)):
        for loss in LOSSES:
            spreads = [gap.spread for gap in gaps(own, loss) if gap.spread and gap.arm not in (CONTROL, ALL)]
            if spreads:
                title = f"{own[0]['model']}, {own[0]['condition']}"
                body.append(_cost(title, LOSSES[loss], seconds_per_block(own), median(spreads)))
    header = ("study", "loss", "seconds per block", "SD of a pair")
    widths = [f"{what} for ± {width:.2f} %" for width in (MARGIN, AIM) for what in ("pairs", "hours")]
    return table((*header, *widths), sorted(body)) if body else ""


def seconds_per_block(rows: Sequence[Row]) -> float:
    """Return the median time of a block with all arms."""
    found = finite_blocks(rows)
    arms = max(len(block) for block in found)
    return median(float(sum(row["seconds"] for row in block)) for block in found if len(block) == arms)


def _cost(name: str, measure: str, seconds: float, pair: float) -> tuple[str, ...]:
    cells = []
    for width in (MARGIN, AIM):
        pairs = pairs_for(width / pair)
        cells += [f"{pairs:,}", f"{pairs * seconds / 3600:.1f}"]
    return (name, measure, f"{seconds:.1f}", f"{pair:.3f} %", *cells)
