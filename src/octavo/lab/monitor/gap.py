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
    """Two or three sentences; empty without a BF16 baseline."""


def judge_gap(summary: Mapping[str, Any]) -> GapVerdict:
    """Return the verdict on the held-out gap of a finished run. Terminal, dashboard, eval and doctor all print it.

    It has the gap, what one run can tell (the noise of the gap), the limit, and what many pairs of longer runs found.
    The noise is the larger of two. From run to run: the interval of BF16 runs of the same preset that differ by
    rounding alone, or, where no such pairs were measured, the fluctuation during the run. Over the text: the interval
    over held-out sequences.

    Args:
        summary: as `summary.json`: `gap_percent`, `gap_95_percent`, `gap_fluctuation_percent`, and of a preset with
            pairs `gap_control_percent` and `gap_control_pairs`; of a recipe with a study `gap_study`, its line of
            `presets/studies.json`; `fp8_gemms_total`. All may be missing or None.
    """
    gap = summary.get("gap_percent")
    if gap is None:
        return GapVerdict(False, None, "")
    if summary.get("fp8_gemms_total") == 0:
        return GapVerdict(False, None, "No GEMM ran in eight bits: there is nothing to compare.")
    found, study = f"held-out loss {_signed(gap)} % relative to BF16", _study(summary.get("gap_study"))
    noises = dict(_noises(summary))
    if not noises:
        text = f"One run cannot tell: {found}, and the run is too short to know by how much chance moves it.{study}"
        return GapVerdict(False, None, text)
    noise = max(noises)
    is_beyond = abs(gap) > noise
    return GapVerdict(is_beyond, noise, f"{_opening(gap, is_beyond)}: {found}. {noises[noise]}.{study}")


def _opening(gap: float, is_beyond: bool) -> str:
    if not is_beyond:
        return "No difference that one run can show"
    if gap < 0:
        return "Below BF16 in this run"
    is_within = gap <= GAP_LIMIT
    return f"Above BF16 in this run, {'within' if is_within else 'beyond'} the limit of {GAP_LIMIT:g} %"


def _noises(summary: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the noises of a gap in percent, each with a sentence that says what it is.

    That of sequences alone is none of a run: another run on the same text has another gap.
    """
    control, fluctuated = summary.get("gap_control_percent"), summary.get("gap_fluctuation_percent")
    if control:
        pairs = f"95 %, {summary['gap_control_pairs']} pairs"
        yield control, f"By chance alone two BF16 runs of this preset differ by up to {_digits(control)} % ({pairs})"
    elif fluctuated:
        yield fluctuated, f"During the run the gap fluctuated by ± {_digits(fluctuated)} %"
    else:
        return
    if between := summary.get("gap_95_percent"):
        yield between, f"Between held-out sequences the gap varies by ± {_digits(between)} % (95 %)"


def _study(found: Mapping[str, Any] | None) -> str:
    """Return what many pairs of runs found for the recipe, as a sentence after a space; empty without a study."""
    if not found:
        return ""
    mean = f"{found['percent']:+.2f} % ± {found['half_width']:.2f} %"
    trained = f"{found['pairs']} pairs, {found['parameters']}, {found['tokens'] / 1e6:.0f} M tokens"
    return f" Many longer runs found {mean} ({found['arm']}: {trained})."


def _signed(percent: float) -> str:
    return f"{'-' if percent < 0 else '+'}{_digits(abs(percent))}"


def _digits(percent: float) -> str:
    """Format with two decimal places, or more of a small one."""
    if percent >= 0.1 or not percent:
        return f"{percent:.2f}"
    return f"{percent:.3f}" if percent >= 0.01 else f"{percent:.2g}"
