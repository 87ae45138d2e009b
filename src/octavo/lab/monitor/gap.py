"""The gap, the percentage by which the FP8 loss exceeds the BF16 baseline's: its noise, and what one run can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GAP_LIMIT = 1.0
"""Limit of the gap in percent where its noise is smaller."""
HARMFUL_GAP = 5 * GAP_LIMIT
"""Gap in percent beyond which a run is unhealthy."""
PARTS = 64
"""Largest number of equal parts of a run, each with its mean gap: the noise of single batches averages out."""
FEWEST = 16
"""Smallest number of gaps whose fluctuation is estimated."""
DEVIATIONS = 3.0
"""Standard deviations that count as fluctuation."""


def fluctuation(gaps: Sequence[float] | NDArray[np.floating]) -> float:
    """Return the gap's fluctuation in percent: `DEVIATIONS` standard deviations about its trend over a run.

    Two runs that differ only by rounding drift apart and back, by several percent early in training, so a final gap
    below the fluctuation can be chance. Real harm is not excused: the deviation is a seminorm, every gap that rises
    from 0 to h without falling is a mean of steps of height h, and no step of height h fluctuates by h or more.

    Args:
        gaps: percent per batch, in the order of steps. Values that are not finite are ignored; fewer than `FEWEST`
            fluctuate by 0.
    """
    values = np.asarray(gaps, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < FEWEST:
        return 0.0
    size = -(-len(values) // PARTS)
    means = values[len(values) % size :].reshape(-1, size).mean(axis=1)
    at = np.arange(len(means))
    rest = means - np.polyval(np.polyfit(at, means, 1), at)
    return float(DEVIATIONS * np.sqrt(rest @ rest / (len(means) - 2)))


class GapVerdict(NamedTuple):
    """What one finished run can tell about its gap."""

    is_beyond: bool
    """Whether the gap exceeds its noise. Only then is it called a difference, and only of this run."""
    noise: float | None
    """Half width of the noise in percent; None if the run is too short for an estimate."""
    text: str
    """One or two sentences; empty without a BF16 baseline."""


def judge_gap(summary: Mapping[str, Any]) -> GapVerdict:
    """Return the verdict on the held-out gap of a finished run. Terminal, dashboard, eval and doctor all print it.

    The noise is the larger of two. From run to run: the interval of BF16 runs of the same preset that differ by
    rounding alone, or, where no such pairs were measured, the fluctuation during the run. Over the text: the interval
    over held-out sequences.

    Args:
        summary: as `summary.json`: `gap_percent`, `gap_95_percent`, `gap_fluctuation_percent`, and of a preset with
            pairs `gap_control_percent` and `gap_control_pairs`; `fp8_gemms_total`. All may be missing or None.
    """
    gap = summary.get("gap_percent")
    if gap is None:
        return GapVerdict(False, None, "")
    if summary.get("fp8_gemms_total") == 0:
        return GapVerdict(False, None, "No GEMM ran in eight bits: there is nothing to compare.")
    loss = f"held-out loss is {_digits(abs(gap))} % {'higher' if gap > 0 else 'lower'} in FP8"
    noises = dict(_noises(summary))
    if not noises:
        return GapVerdict(False, None, f"One run cannot tell: {loss}, and the run is too short to know its noise.")
    noise = max(noises)
    if abs(gap) <= noise:
        return GapVerdict(False, noise, f"One run cannot tell: {loss}, and {noises[noise]}.")
    better = "better" if gap < 0 else "worse"
    text = f"In this run FP8 is {better}: {loss}, and {noises[noise]}. Other seeds may differ."
    return GapVerdict(True, noise, text)


def _noises(summary: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the noises of a gap in percent, each with a clause that says what it is.

    That of sequences alone is none of a run: another run on the same text has another gap.
    """
    control, fluctuated = summary.get("gap_control_percent"), summary.get("gap_fluctuation_percent")
    if control:
        pairs = f"95 %, {summary['gap_control_pairs']} pairs"
        yield control, f"two BF16 runs of this preset differ by up to {_digits(control)} % ({pairs})"
    elif fluctuated:
        yield fluctuated, f"the gap fluctuated by ± {_digits(fluctuated)} % during the run"
    else:
        return
    if between := summary.get("gap_95_percent"):
        yield between, f"the gap varies by ± {_digits(between)} % between held-out sequences"


def _digits(percent: float) -> str:
    """Format with two decimal places, or more of a small one."""
    return f"{percent:.2f}" if percent >= 0.1 or not percent else f"{percent:.4f}"
