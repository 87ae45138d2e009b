"""Which recipe is the default, and why: what parity, speed and stress have measured of each, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo.conversion import make_plan
from octavo_bench import results
from octavo_bench.tables.markdown import table

Row = dict[str, Any]

DEFAULT: str = signature(make_plan).parameters["recipe"].default
"""The recipe that `octavo.convert` takes where none is named."""
WORKLOAD = "llama-8b-stack"
HEADER = (
    "recipe",
    "gap to BF16, held-out",
    "inside BF16's seed spread",
    "times BF16's speed",
    "peak GiB",
    "noisiest median row under stress",
)


def choice(directory: Path) -> str:
    """Return the table of the recipes that were trained to compare them, and what follows from it.

    The gap is that of the largest model, speed and memory those of the stack of 8B blocks; under stress it is the
    lowest signal to noise that the median row of a product had in any case.

    Args:
        directory: of the results.
    """
    trained = _largest(_rows("parity", directory))
    bf16 = {row["seed"]: row["heldout_loss"] for row in trained if row["recipe"] == "bf16"}
    if len(bf16) < 2:
        return ""
    spread = 100 * (max(bf16.values()) - min(bf16.values())) / fmean(bf16.values())
    timed = {row["implementation"]: row for row in _rows("step", directory) if row["workload"] == WORKLOAD}
    gaps = _gaps(trained, bf16)
    speeds = {recipe: timed.get(f"octavo {recipe}", {}).get("ratio_to_bf16") for recipe in gaps}
    stress = list(_rows("stress", directory))
    body = [
        (
            f"`{recipe}`" + (" (default)" if recipe == DEFAULT else ""),
            f"{gap:+.2f} %",
            "yes" if abs(gap) <= spread else "no",
            _figure(speeds[recipe], "{:.2f}"),
            _figure(timed.get(f"octavo {recipe}", {}).get("peak_gib"), "{:.1f}"),
            _figure(_lowest(row for row in stress if row["recipe"] == recipe), "{:.1f} dB"),
        )
        for recipe, gap in gaps.items()
    ]
    return f"{table(HEADER, body)}\n\n{_conclusion(gaps, speeds, spread, trained[0], len(bf16))}"


def _conclusion(
    gaps: Mapping[str, float], speeds: Mapping[str, float | None], spread: float, run: Row, seeds: int
) -> str:
    """Return what the figures say of the default, whichever way they fall."""
    inside = [recipe for recipe, gap in gaps.items() if abs(gap) <= spread]
    fastest = max((recipe for recipe in inside if speeds[recipe]), key=lambda recipe: speeds[recipe] or 0, default=None)
    said = [
        f"{run['model']}, {run['tokens']:,} tokens; {seeds} BF16 seeds lie {spread:.2f} % apart."
        f" Inside that spread: {', '.join(f'`{recipe}`' for recipe in inside) or 'none'}."
    ]
    if fastest is not None:
        said.append(f"The fastest of them is `{fastest}`.")
    if DEFAULT in gaps and DEFAULT not in inside:
        said.append(f"The default, `{DEFAULT}`, is outside.")
    return " ".join(said)


def _rows(kind: str, directory: Path) -> Sequence[Row]:
    result = results.latest(kind, directory)
    return () if result is None else result.rows


def _largest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the model that took the longest steps in BF16: the largest."""
    times = {row["model"]: row.get("step_ms", 0.0) for row in rows if row["recipe"] == "bf16"}
    return [row for row in rows if times and row["model"] == max(times, key=lambda model: times[model])]


def _gaps(rows: Sequence[Row], bf16: Mapping[int, float]) -> dict[str, float]:
    """Return the mean gap of each recipe over the seeds that BF16 has too, in percent of BF16's loss."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["recipe"] != "bf16" and row["seed"] in bf16:
            found.setdefault(row["recipe"], []).append(100 * (row["heldout_loss"] / bf16[row["seed"]] - 1))
    return {recipe: fmean(gaps) for recipe, gaps in found.items()}


def _lowest(rows: Iterable[Row]) -> float | None:
    return min((value for row in rows for key, value in row.items() if key.endswith("_median_db")), default=None)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
