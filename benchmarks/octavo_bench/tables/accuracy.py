"""What the docs show of accuracy: the demo, parity with BF16, stress, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from octavo.errors import ConfigError
from octavo_bench.accuracy.paired import over_seeds, student
from octavo_bench.results import Result
from octavo_bench.tables.markdown import table
from octavo_bench.tables.rows import Row, grouped


def demo(result: Result) -> str:
    """Return the table of the demo: both held-out losses, the gap, and the entropy of single bytes."""
    header = ("device", "recipe", "steps", "tokens", "FP8 loss", "BF16 loss", "gap", "byte entropy")
    rows = [
        (
            row["device"],
            row["recipe"],
            f"{row['steps']:,}",
            f"{row['tokens']:,}",
            f"{row['heldout_loss_fp8']:.4f}",
            f"{row['heldout_loss_bf16']:.4f}",
            f"{row['gap_percent']:+.2f} %",
            f"{row['unigram_entropy']:.4f}" if "unigram_entropy" in row else "",
        )
        for row in result.rows
    ]
    return table(header, rows)


def parity(result: Result) -> str:
    """Return, for each model, the held-out loss of every recipe and seed, and the gap to BF16 of the same seeds."""
    return parity_of(result.rows)


def parity_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    groups = grouped(rows, "model", "tokens")
    return "\n\n".join(_parity_of(f"{model}, {tokens:,} tokens", rows) for (model, tokens), rows in groups.items())


def parity_summary(result: Result) -> str:
    """Return one line a model and recipe: the mean loss, and its gap to BF16 beside the spread of BF16's seeds."""
    header = ("model", "tokens", "recipe", "seeds", "held-out loss", "gap to BF16", "BF16 seeds apart")
    body = []
    for (model, tokens), of_model in grouped(result.rows, "model", "tokens").items():
        recipes = {recipe: rows for (recipe,), rows in grouped(of_model, "recipe").items()}
        losses = _by_seed(recipes.pop("bf16", []))
        spread = ""
        if len(losses) > 1:
            spread = f"{100 * (max(losses.values()) - min(losses.values())) / fmean(losses.values()):.2f} %"
        for recipe, rows in recipes.items():
            own = _by_seed(rows)
            mean, gap = f"{fmean(own.values()):.4f}", _gap(own, losses)[0]
            body.append((model, f"{tokens:,}", f"`{recipe}`", str(len(own)), mean, gap, spread))
    return table(header, body)


def _by_seed(rows: Sequence[Row]) -> dict[int, float]:
    return {row["seed"]: row["heldout_loss"] for row in rows}


EVIDENCE = (
    ("95 % over sequences", "gap_95", "± {:.3f} %"),
    ("tokens to equal loss", "tokens_ratio", "{:.3f}"),
    ("speed at equal loss", "loss_matched_speedup", "{:.2f}"),
    ("gradient cosine, start", "cosine_start", "{:.4f}"),
    ("worst matrix", "cosine_layer_start", "{:.4f}"),
    ("gradient cosine, end", "cosine_end", "{:.4f}"),
    ("worst matrix", "cosine_layer_end", "{:.4f}"),
)
"""Title, key of the row, format: the mean over the seeds. A column that no row has a figure for is left out."""


def _parity_of(title: str, rows: Sequence[Row]) -> str:
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        of_recipe = losses.setdefault(row["recipe"], {})
        if row["seed"] in of_recipe:
            raise ConfigError(f"result of kind 'parity': {title}: {row['recipe']}, seed {row['seed']} stands twice.")
        of_recipe[row["seed"]] = row["heldout_loss"]
    seeds = sorted({row["seed"] for row in rows})
    bf16 = losses.get("bf16", {})
    shown = [column for column in EVIDENCE if any(column[1] in row for row in rows)]
    body = [
        (
            recipe,
            *(f"{by_seed[seed]:.4f}" if seed in by_seed else "" for seed in seeds),
            f"{fmean(by_seed.values()):.4f}",
            *(("", "") if recipe == "bf16" else _gap(by_seed, bf16)),
            *(_evidence([row for row in rows if row["recipe"] == recipe], key, form) for _, key, form in shown),
        )
        for recipe, by_seed in losses.items()
    ]
    titles = ("gap to BF16", "95 % over seeds", *(title for title, *_ in shown))
    header = ("recipe", *(f"seed {seed}" for seed in seeds), "mean", *titles)
    pairs = [len(by_seed.keys() & bf16.keys()) for recipe, by_seed in losses.items() if recipe != "bf16"]
    said = f"{_spread(list(bf16.values()))} {_meaning(pairs, [key for _, key, _ in shown])}".strip()
    return f"**{title}**: held-out loss, nats a token\n\n{table(header, body)}\n\n{said}"


def tiers(result: Result) -> str:
    """Return one line a tier of optimizer states: held-out loss of each seed, and the gap to FP32 states."""
    return tiers_of(result.rows)


def tiers_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    parts = []
    for (model, tokens), of_model in grouped(rows, "model", "tokens").items():
        seeds = sorted({row["seed"] for row in of_model})
        body = []
        for (states,), of_states in grouped(of_model, "states").items():
            losses = {row["seed"]: row["heldout_loss"] for row in of_states}
            cells = [f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds]
            beside = [f"{100 * row['gap'] / row['heldout_loss']:+.2f} %" for row in of_states if "gap" in row]
            within = _evidence(of_states, "gap_95", "± {:.3f} %")
            body.append((states, *cells, f"{fmean(losses.values()):.4f}", ", ".join(beside), within))
        header = ("states", *(f"seed {seed}" for seed in seeds), "mean", "gap to fp32, by seed", "95 % over sequences")
        first = [row["heldout_loss"] for row in of_model if row["states"] == of_model[0]["states"]]
        apart = f"The {len(first)} seeds of `{of_model[0]['states']}` lie {max(first) - min(first):.4f} apart."
        title = f"**{model}, {tokens:,} tokens**: held-out loss, nats a token"
        parts.append("\n\n".join([title, table(header, body), *([apart] if len(first) > 1 else [])]))
    return "\n\n".join(parts)


def _gap(losses: dict[int, float], bf16: dict[int, float]) -> tuple[str, str]:
    """Return the mean gap over the seeds that both have, and half of its interval."""
    gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in losses.items() if seed in bf16]
    if not gaps:
        return "BF16 not measured", ""
    found = over_seeds(gaps)
    return f"{found.mean:+.2f} %", "" if found.half_width is None else f"± {found.half_width:.2f} %"


def _evidence(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] * (100 / row["heldout_loss"] if key == "gap_95" else 1) for row in rows if key in row]
    return form.format(fmean(values)) if values else ""


def _meaning(pairs: Sequence[int], shown: Sequence[str]) -> str:
    """Return how the intervals and ratios are to be read; `pairs`: seeds that a recipe shares with BF16, for each."""
    said = []
    if factors := [f"{student(count - 1):.1f} standard errors with {count} seeds" for count in {*pairs} if count > 1]:
        said.append(
            f"The interval over seeds is Student's t for pairs of the same seed, {', '.join(factors)}: whether another"
            " seed would show the gap."
        )
    if "gap_95" in shown:
        said.append("The one over sequences compares the same held-out text: whether these very weights differ.")
    if "tokens_ratio" in shown:
        said.append(
            "Equal loss is the final smoothed training loss of the one that ended higher; tokens and speed at it are in"
            " units of BF16's."
        )
    return " ".join(said)


def _spread(bf16: Sequence[float]) -> str:
    if len(bf16) < 2:
        return f"BF16 was trained with {len(bf16)} seeds, so its own spread is not known."
    spread = max(bf16) - min(bf16)
    lie = f"The {len(bf16)} BF16 seeds lie {spread:.4f} apart ({100 * spread / fmean(bf16):.2f} %)"
    return f"{lie}: a gap inside that spread cannot be told from chance."


def stress(result: Result) -> str:
    """Return, for each case, the signal to noise of the three products by every recipe: median row / worst row."""
    blocks = []
    for (case,), rows in grouped(result.rows, "case").items():
        body = [(row["recipe"], *(_stress_cell(row, name) for name in ("y", "dx", "dw"))) for row in rows]
        blocks.append(f"**{case}**\n\n{table(('recipe', 'Y', 'dX', 'dW'), body)}")
    return "\n\n".join(blocks)


def _stress_cell(row: Row, name: str) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    if f"{name}_worst_db" not in row:
        return "not finite"
    return f"{row[f'{name}_median_db']:.1f} / {row[f'{name}_worst_db']:.1f} dB"


def faults(result: Result) -> str:
    """Return, for each fault, when it was found, what was said of it, and what it cost in the end."""
    header = ("fault", "recipe", "struck", "found", "cause", "layer", "what was done", "held-out loss")
    rows = [(row["fault"], row["recipe"], f"step {row['struck_step']}", *_found(row)) for row in result.rows]
    return table(header, rows)


def _found(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return "", f"failed: {row['error']}", "", "", ""
    return (
        f"step {row['detected_step']}",
        row["cause"],
        row["layer"],
        row["action"],
        f"{row['final_loss_change']:+.2f} %",
    )


def localize(result: Result) -> str:
    """Return, for single layers and for random maps of each workload, how predicted and measured loss change agree."""
    header = ("workload", "recipe", "maps", "count", "tokens to predict", "tokens to measure", "rank correlation")
    rows = [
        (
            row["workload"],
            row["recipe"],
            row["maps"],
            str(len(row["predicted"])),
            f"{row['probe_tokens']:,}",
            f"{row['heldout_tokens']:,}",
            f"{row['rank_correlation']:.3f}",
        )
        for row in result.rows
    ]
    return table(header, rows)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "demo": ("demo", demo),
    "parity": ("parity", parity),
    "parity-summary": ("parity", parity_summary),
    "tiers": ("tiers", tiers),
    "stress": ("stress", stress),
    "faults": ("faults", faults),
    "localize": ("localize", localize),
}
"""By name: the kind whose newest result the table shows, and what shows it."""
