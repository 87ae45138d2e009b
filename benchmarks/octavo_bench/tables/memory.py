"""What the docs show of memory: storage of optimizers, its ablation, and the peak of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from octavo.memory import KINDS
from octavo_bench.results import Result
from octavo_bench.tables.markdown import table
from octavo_bench.tables.rows import Row, figures, grouped

OPTIMIZER_COLUMNS = (
    ("bytes a parameter", "bytes_per_parameter", "{:.2f}"),
    ("ms", "ms", "{:.2f}"),
    ("of fused AdamW's time", "ratio_to_fused_adamw", "{:.2f}"),
    ("ms with clipping", "ms_clipped", "{:.2f}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("of a copy's", "ratio_to_copy", "{:.2f}"),
    ("update error, dB", "update_error_db", "{:.1f}"),
    ("held-out loss", "heldout_loss", "{:.4f}"),
)


def optimizer(result: Result) -> str:
    """Return one line a tier and dtype of the weight: bytes, time, and the rate of what it must read and write."""
    return figures(("states", "weight", "gradient"), OPTIMIZER_COLUMNS, result.rows)


def ablation(result: Result) -> str:
    """Return one line a choice of storage: held-out loss of each seed, or that it diverged, and the gap to FP32."""
    seeds = sorted({row["seed"] for row in result.rows})
    losses = {(row["states"], row["seed"]): row.get("heldout_loss", math.nan) for row in result.rows}
    first = result.rows[0]["states"]
    body = []
    for (states,), rows in grouped(result.rows, "states").items():
        found = [losses.get((states, seed), math.nan) for seed in seeds]
        gap = fmean(loss - losses[first, seed] for loss, seed in zip(found, seeds, strict=True))
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        body.append((states, rows[0].get("about", ""), *cells, f"{gap:+.4f}" if math.isfinite(gap) else ""))
    return table(("states", "storage", *(f"seed {seed}" for seed in seeds), f"gap to {first}"), body)


FLOOR, DECADE = 1e-3, 16
"""Nats where the bars of `ablation_figure` begin, and the characters that each factor of ten has."""


def ablation_figure(result: Result) -> str:
    """Return the gaps to FP32 as bars on a logarithmic scale: of each choice the mean, and the range of its seeds."""
    exact = {row["seed"]: row["heldout_loss"] for row in result.rows if row["states"] == result.rows[0]["states"]}
    groups = grouped(result.rows[len(exact) :], "states")
    width = max(len(states) for (states,) in groups)
    lines = [f"{'':{width}}  held-out loss above FP32's, nats; {DECADE} characters are a factor of ten, from {FLOOR}"]
    for (states,), rows in groups.items():
        gaps = [row["heldout_loss"] - exact[row["seed"]] for row in rows if "heldout_loss" in row]
        if len(gaps) < len(rows):
            failed = f"diverged: {len(rows) - len(gaps)} of {len(rows)} seeds"
            lines.append(f"{states:{width}}  {'x' * 3 * DECADE} {failed}")
            continue
        gap = fmean(gaps)
        bar = "█" * round(DECADE * math.log10(max(gap / FLOOR, 1.0)))
        lines.append(f"{states:{width}}  {bar}{' ' if bar else ''}{gap:+.4f}  ({min(gaps):+.4f} to {max(gaps):+.4f})")
    return "\n".join(("```text", *lines, "```"))


def memory(result: Result) -> str:
    """Return one line a workload and case: parameters, measured and predicted peak, and the forecast by kind."""
    return _memory(result, KINDS)


def memory_summary(result: Result) -> str:
    """Return the same without the forecast by kind."""
    return _memory(result, ())


def _memory(result: Result, kinds: Sequence[str]) -> str:
    header = ("workload", "trained as", "parameters", "peak GiB", "predicted", "error", "less than the first", *kinds)
    body = []
    for (workload,), rows in grouped(result.rows, "workload").items():
        first = next((row["peak_gib"] for row in rows if "error" not in row), None)
        body += [(workload, row["implementation"], *_memory_cells(row, first, kinds)) for row in rows]
    return table(header, body)


def _memory_cells(row: Row, first: float | None, kinds: Sequence[str]) -> list[str]:
    if "error" in row or first is None:
        return ["", "failed", f"{row['predicted_gib']:.2f}" if "predicted_gib" in row else "", *[""] * (2 + len(kinds))]
    error = row["predicted_gib"] / row["peak_gib"] - 1
    less = f"{1 - row['peak_gib'] / first:.0%}" if "largest" not in row["workload"] else ""
    of_kinds = [f"{row[f'{kind}_gib']:.2f}" if f"{kind}_gib" in row else "" for kind in kinds]
    size = f"{row['parameters'] / 1e9:.2f} B" if "parameters" in row else ""
    return [size, f"{row['peak_gib']:.2f}", f"{row['predicted_gib']:.2f}", f"{error:+.1%}", less, *of_kinds]


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "optimizer": ("optimizer", optimizer),
    "memory": ("memory", memory),
    "memory-summary": ("memory", memory_summary),
    "ablation": ("ablation", ablation),
    "ablation-figure": ("ablation", ablation_figure),
}
"""By name: the kind whose newest result the table shows, and what shows it."""
