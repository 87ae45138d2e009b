"""Closed studies: questions that are answered. Their results stay, and their tables; their code is in the history.

ablation    FP8-LM's ablation of optimizer precision (arXiv 2310.18313, table 6) on a small byte-level model
localize    predictions of `octavo localize`, against single layers and random maps applied on other text
telemetry   cost of telemetry: alternating steps with and without it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from octavo_bench.kind import Kind, by_result
from octavo_bench.render import figures, grouped, table
from octavo_bench.results import Row


def by_storage(rows: Sequence[Row]) -> str:
    """Return one line per choice of storage: held-out loss of each seed, or that it diverged, and the gap to FP32."""
    seeds = sorted({row["seed"] for row in rows})
    losses = {(row["states"], row["seed"]): row.get("heldout_loss", math.nan) for row in rows}
    first = rows[0]["states"]
    body = []
    for (states,), own in grouped(rows, "states").items():
        found = [losses.get((states, seed), math.nan) for seed in seeds]
        gap = fmean(loss - losses[first, seed] for loss, seed in zip(found, seeds, strict=True))
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        body.append((states, own[0].get("about", ""), *cells, f"{gap:+z.4f}" if math.isfinite(gap) else ""))
    return table(("states", "storage", *(f"seed {seed}" for seed in seeds), f"gap to {first}"), body)


FLOOR, DECADE = 1e-3, 16
"""Start of the bars in nats, and characters per factor of ten."""


def bars(rows: Sequence[Row]) -> str:
    """Return the gaps to FP32 as bars on a logarithmic scale: mean and range over seeds, per choice."""
    exact = {row["seed"]: row["heldout_loss"] for row in rows if row["states"] == rows[0]["states"]}
    groups = grouped(rows[len(exact) :], "states")
    width = max(len(states) for (states,) in groups)
    lines = [f"{'':{width}}  held-out loss above FP32's, nats; {DECADE} characters are a factor of ten, from {FLOOR}"]
    for (states,), own in groups.items():
        gaps = [row["heldout_loss"] - exact[row["seed"]] for row in own if "heldout_loss" in row]
        if len(gaps) < len(own):
            failed = f"diverged: {len(own) - len(gaps)} of {len(own)} seeds"
            lines.append(f"{states:{width}}  {'x' * 3 * DECADE} {failed}")
            continue
        gap = fmean(gaps)
        bar = "█" * round(DECADE * math.log10(max(gap / FLOOR, 1.0)))
        lines.append(
            f"{states:{width}}  {bar}{' ' if bar else ''}{gap:+z.4f}  ({min(gaps):+z.4f} to {max(gaps):+z.4f})"
        )
    return "\n".join(("```text", *lines, "```"))


ABLATION = Kind(
    name="ablation",
    keys={"states": str, "seed": int, "heldout_loss": float},
    columns=(
        ("states", "{states}"),
        ("seed", "seed {seed}"),
        ("held-out loss", "{heldout_loss:.4f}"),
        ("storage", "{about}"),
    ),
    names=2,
    closed=True,
    show=by_storage,
    tables={"ablation-figure": by_result("ablation", bars)},
)
LOCALIZE = Kind(
    name="localize",
    keys={"workload": str, "layers": int, "predicted": list, "measured": list, "rank_correlation": float},
    columns=(
        ("workload", "{workload}"),
        ("recipe", "{recipe}"),
        ("maps", "{maps}"),
        ("count", "{count}"),
        ("tokens to predict", "{probe_tokens:,}"),
        ("tokens to measure", "{heldout_tokens:,}"),
        ("rank correlation", "{rank_correlation:.3f}"),
    ),
    names=3,
    closed=True,
    derived=lambda row: {"count": len(row["predicted"])},
    may_fail=False,
)
TELEMETRY: Kind = Kind(
    name="telemetry",
    keys={"workload": str, "overhead_percent": float},
    columns=(
        ("workload", "{workload}"),
        ("on", "{device}"),
        ("tokens", "{tokens:,}"),
        ("tensors", "{tensors}"),
        ("ms without", "{ms:.2f}"),
        ("ms with", "{ms_watched:.2f}"),
        ("overhead", "{overhead_percent:+z.2f} %"),
        ("95 % interval", "{low_percent:+z.2f} to {high_percent:+z.2f} %"),
        ("own code", "{own_percent:.2f} %"),
    ),
    names=2,
    closed=True,
    show=lambda rows: figures(TELEMETRY.columns, rows, every=True),
    session=("hardware",),
    may_fail=False,
)
