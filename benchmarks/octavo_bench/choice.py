"""Comparison of the trained recipes, and which one to choose: a table from several kinds of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from octavo.recipes import DEFAULT
from octavo_bench import results
from octavo_bench.compare import spread_percent
from octavo_bench.implementations import BF16
from octavo_bench.readme import Measured
from octavo_bench.render import figures, grouped
from octavo_bench.results import Row
from octavo_bench.study import by_seed

WORKLOAD = "llama-8b-stack"
COLUMNS = (
    ("recipe", "{named}"),
    ("gap to BF16, held-out", "{gap:+z.2f} %"),
    ("inside BF16's seed spread", "{inside}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    ("peak GiB", "{peak_gib:.1f}"),
    ("noisiest median row under stress", "{lowest:.1f} dB"),
)


def choice(directory: Path) -> str:
    """Return the table of the recipes, and the conclusion.

    Gap: of the largest model. Speed and memory: of the stack of 8B blocks. Stress: the lowest signal-to-noise ratio of
    a product's median row over all cases.

    Args:
        directory: directory of the results.
    """
    trained = _largest(_rows("parity", directory))
    bf16 = by_seed([row for row in trained if row["recipe"] == BF16])
    if len(bf16) < 2:
        return ""
    spread = spread_percent(list(bf16.values()))
    measured = Measured.read(directory)
    rows = []
    for (recipe,), of_recipe in grouped(trained, "recipe").items():
        gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in by_seed(of_recipe).items() if seed in bf16]
        if recipe == BF16 or not gaps:
            continue
        row = {"recipe": recipe, "named": f"`{recipe}`" + (" (default)" if recipe == DEFAULT else "")}
        row |= {"gap": fmean(gaps), "inside": "yes" if abs(fmean(gaps)) <= spread else "no"}
        stressed = [row for row in _rows("stress", directory) if row["recipe"] == recipe]
        noise = [value for row in stressed for key, value in row.items() if key.endswith("_median_db")]
        step = measured.step(WORKLOAD, f"octavo {recipe}")
        speed = {key: step.own[key] for key in ("ratio_to_bf16", "peak_gib")} if step else {}
        rows.append(row | speed | ({"lowest": min(noise)} if noise else {}))
    return f"{figures(COLUMNS, rows, every=True)}\n\n{_conclusion(rows, spread, trained[0], len(bf16))}"


def _conclusion(rows: Sequence[Row], spread: float, run: Row, seeds: int) -> str:
    inside = [row for row in rows if row["inside"] == "yes"]
    names = [row["recipe"] for row in inside]
    fastest = max((row for row in inside if row.get("ratio_to_bf16")), key=lambda r: r["ratio_to_bf16"], default=None)
    said = [
        f"{run['model']}, {run['tokens']:,} tokens; {seeds} BF16 seeds lie {spread:.2f} % apart."
        f" Inside that spread: {', '.join(f'`{name}`' for name in names) or 'none'}."
    ]
    if fastest is not None:
        said.append(f"The fastest of them is `{fastest['recipe']}`.")
    if DEFAULT in [row["recipe"] for row in rows] and DEFAULT not in names:
        said.append(f"The default, `{DEFAULT}`, is outside.")
    return " ".join(said)


def _rows(kind: str, directory: Path) -> Sequence[Row]:
    return [row for result in results.newest(kind, directory) for row in result.rows]


def _largest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the largest model, that with the longest BF16 step."""
    times = {(row["model"], row["tokens"]): row.get("step_ms", 0.0) for row in rows if row["recipe"] == BF16}
    largest = max(times, key=lambda run: times[run], default=None)
    return [row for row in rows if (row["model"], row["tokens"]) == largest]
