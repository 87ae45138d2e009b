"""Closed studies: questions that are answered. Their results stay, and their tables; their code is in the history.

conv        convolutions of cuDNN in FP8, in three directions, beside those in BF16
ablation    FP8-LM's ablation of optimizer precision (arXiv 2310.18313, table 6) on a small byte-level model
localize    predictions of `octavo localize`, against single layers and random maps applied on other text
telemetry   cost of telemetry: alternating steps with and without it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
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


PASSES = {
    "fprop": ("cast x",),
    "dgrad": ("cast dy", "transpose w"),
    "wgrad": ("cast x", "cast dy", "transpose x", "transpose dy"),
}
"""What a direction in FP8 needs before its convolution: codes, with scales of an earlier step, in cuDNN's layouts."""


def by_convolution(rows: Sequence[Row]) -> str:
    """Return one line per convolution: FP8's speed beside BF16's, by direction, and with the passes around them.

    With passes: all three directions in FP8, and those whose choice is the fastest.
    """
    body = []
    for (shape,), own in grouped(rows, "shape").items():
        by_direction = {row["direction"]: row for row in own if "fp8_ms" in row}
        found = [by_direction.get(direction) for direction in PASSES]
        cells = ["no plan" if row is None else _at_least(row["bf16_ms"] / row["fp8_ms"], [row]) for row in found]
        bf16 = sum(row["bf16_ms"] for row in own)
        chosen = [_at_least(bf16 / ms, own) for ms in _with_passes(own)] if None not in found else ["", ""]
        body.append((shape, own[0]["sizes"], f"{bf16:.2f}", *cells, *chosen))
    header = ("convolution", "images, channels, pixels", "BF16 ms", *PASSES, "all, with passes", "best, with passes")
    return table(header, body)


def _at_least(ratio: float, rows: Sequence[Row]) -> str:
    """Return a ratio, as a lower bound if time ran out before all plans that cuDNN lists were timed."""
    return f"{'≥ ' if any(row.get('is_cut') for row in rows) else ''}{ratio:.2f}"


def _with_passes(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the ms of a convolution with its passes: all directions in FP8, and the fastest choice of them."""
    by_direction, passes = {row["direction"]: row for row in rows}, rows[0]["passes"]

    def ms(chosen: tuple[str, ...]) -> float:
        spent = sum(passes[name] for name in {name for direction in chosen for name in PASSES[direction]})
        convolved = sum(row["fp8_ms" if name in chosen else "bf16_ms"] for name, row in by_direction.items())
        return float(spent + convolved)

    choices = [chosen for count in range(len(PASSES) + 1) for chosen in combinations(PASSES, count)]
    return ms(choices[-1]), min(map(ms, choices))


CONV = Kind(
    name="conv",
    keys={"shape": str, "direction": str, "bf16_ms": float, "fp8_ms": float},
    columns=(
        ("convolution", "{shape}"),
        ("direction", "{direction}"),
        ("BF16 ms", "{bf16_ms:.3f}"),
        ("FP8 ms", "{fp8_ms:.3f}"),
        ("plan", "{plan}"),
    ),
    names=2,
    closed=True,
    show=by_convolution,
    session=("hardware",),
)
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
