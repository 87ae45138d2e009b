"""`octavo bench compare`: one model trained by several recipes and seeds, on the same batches.

The spread between BF16 seeds shows which differences are significant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from octavo.errors import ConfigError
from octavo.lab.train.evaluate import student
from octavo.lab.train.files import read_metrics
from octavo_bench.evidence import Curve, equal_loss, gradient_cosines, over_seeds, read_curve
from octavo_bench.implementations import BF16
from octavo_bench.kind import TO_STDOUT, Kind, Output, numbers
from octavo_bench.render import grouped, table
from octavo_bench.results import Row
from octavo_bench.study import RUNS, Job, Runs, by_seed, mean_cell, seed_cells, seed_titles

EVIDENCE = (
    ("95 % over sequences", "gap_95", "± {:.3f} %"),
    ("tokens to equal loss", "tokens_ratio", "{:.3f}"),
    ("speed at equal loss", "loss_matched_speedup", "{:.2f}"),
    ("gradient cosine, start", "cosine_start", "{:.4f}"),
    ("worst matrix", "cosine_layer_start", "{:.4f}"),
    ("gradient cosine, end", "cosine_end", "{:.4f}"),
    ("worst matrix", "cosine_layer_end", "{:.4f}"),
)
"""Title, key of the row, format of the mean over the seeds."""


def by_recipe(rows: Sequence[Row]) -> str:
    """Return, per model, the held-out loss of every recipe and seed, and the gap to BF16 of the same seeds."""
    groups = grouped(rows, "model", "tokens").items()
    return "\n\n".join(_of_model(f"{model}, {tokens:,} tokens", own) for (model, tokens), own in groups)


def _of_model(title: str, rows: Sequence[Row]) -> str:
    of_recipes = {recipe: of_recipe for (recipe,), of_recipe in grouped(rows, "recipe").items()}
    losses = {recipe: by_seed(of_recipe) for recipe, of_recipe in of_recipes.items()}
    for recipe, of_recipe in of_recipes.items():
        for (seed,), repeated in grouped(of_recipe, "seed").items():
            if len(repeated) > 1:
                raise ConfigError(f"result of kind 'parity': {title}: {recipe}, seed {seed} occurs twice.")
    bf16, seeds = losses.get(BF16, {}), sorted({row["seed"] for row in rows})
    shown = [column for column in EVIDENCE if any(column[1] in row for row in rows)]
    body = [
        (
            recipe,
            *seed_cells(own, seeds),
            *(("", "") if recipe == BF16 else _gap(own, bf16)),
            *(mean_cell(of_recipes[recipe], key, form) for _, key, form in shown),
        )
        for recipe, own in losses.items()
    ]
    header = ("recipe", *seed_titles(seeds), "gap to BF16", "95 % over seeds", *(title for title, *_ in shown))
    pairs = [len(own.keys() & bf16.keys()) for recipe, own in losses.items() if recipe != BF16]
    said = f"{_spread(list(bf16.values()))} {_meaning(pairs, [key for _, key, _ in shown])}".strip()
    return f"**{title}**: held-out loss, nats per token\n\n{table(header, body)}\n\n{said}"


def _gap(losses: Mapping[int, float], bf16: Mapping[int, float]) -> tuple[str, str]:
    """Return the mean gap over common seeds, and the half width of its interval."""
    gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in losses.items() if seed in bf16]
    if not gaps:
        return "BF16 not measured", ""
    found = over_seeds(gaps)
    return f"{found.mean:+z.2f} %", "" if found.half_width is None else f"± {found.half_width:.2f} %"


def _meaning(pairs: Sequence[int], shown: Sequence[str]) -> str:
    """Return how to read the intervals and ratios; `pairs`: the numbers of seeds that recipes share with BF16."""
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
    lie = f"The {len(bf16)} BF16 seeds lie {max(bf16) - min(bf16):.4f} apart ({spread_percent(bf16):.2f} %)"
    return f"{lie}: a gap inside that spread cannot be told from chance."


def spread_percent(losses: Sequence[float]) -> float:
    """Return the range of losses, in percent of their mean."""
    return 100 * (max(losses) - min(losses)) / fmean(losses)


KIND = Kind(
    name="parity",
    keys={"model": str, "tokens": int, "recipe": str, "seed": int, "heldout_loss": float},
    show=by_recipe,
    may_fail=False,
    measured_by="octavo bench compare",
)


def jobs(recipes: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Return a run per recipe and seed, each paired with BF16 of its seed."""
    return [
        Job(
            {"recipe": recipe, "seed": seed},
            ("--recipe", recipe, "--seed", str(seed)),
            "" if recipe == BF16 else f"{BF16}-{seed}",
        )
        for seed in seeds
        for recipe in recipes
    ]


def add_evidence(rows: Sequence[Row], out: Path, *, report: Callable[[str], None] = print) -> list[Row]:
    """Return the rows with evidence on each recipe against BF16 of the same seed, besides the gap.

    Rows of BF16, and of seeds without a BF16 run, are unchanged. The others get

        tokens_ratio                tokens to BF16's loss, in units of BF16's (`equal_loss`)
        loss_matched_speedup        BF16's time to that loss, in units of the recipe's
        cosine_...                  of gradients (`gradient_cosines`), measured once, for the first such seed

    Args:
        out: directory of the runs.
    """
    bf16 = {row["seed"]: row for row in rows if row["recipe"] == BF16}
    compared = [row for row in rows if row["recipe"] != BF16 and row["seed"] in bf16]
    cosines: dict[str, Row] = {}
    if compared:
        seed = compared[0]["seed"]
        report(f"gradients at the weights of bf16 seed {seed}")
        cosines = dict(gradient_cosines(out / f"bf16-{seed}", list(dict.fromkeys(row["recipe"] for row in compared))))
    beside = {id(row): _beside(row, bf16[row["seed"]], out) | cosines[row["recipe"]] for row in compared}
    return [row | beside.get(id(row), {}) for row in rows]


def _beside(row: Row, bf16: Row, out: Path) -> Row:
    equal = equal_loss(*_curves(row["recipe"], row["seed"], out))
    return {
        "equal_loss": equal.loss,
        "tokens_ratio": equal.tokens_ratio,
        "loss_matched_speedup": bf16["step_ms"] / row["step_ms"] / equal.tokens_ratio,
    }


def _curves(recipe: str, seed: int, out: Path) -> tuple[Curve, Curve]:
    """Return the smoothed training losses of a run, and of BF16 with its seed."""
    mine, reference = (read_metrics(out / f"{name}-{seed}" / "metrics.jsonl") for name in (recipe, BF16))
    return read_curve(mine, "fp8"), read_curve(reference, BF16)


def gap_curves(out: Path, rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return, per recipe, its smoothed training loss minus that of BF16 over tokens, for the first seed."""
    seeds = {row["recipe"]: row["seed"] for row in reversed(rows) if "tokens_ratio" in row}
    gaps = {}
    for recipe, seed in reversed(seeds.items()):
        mine, reference = _curves(recipe, seed, out)
        pairs = zip(mine.tokens, mine.loss, reference.loss, strict=False)
        gaps[recipe] = [(tokens, a - b) for tokens, a, b in pairs]
    return gaps


def curves(out: Path, rows: Sequence[Row]) -> list[Row]:
    """Return the logged training loss of every run, one row each: recipe, seed, steps and losses."""
    found = []
    for recipe, seed in ((row["recipe"], row["seed"]) for row in rows):
        key = "loss_bf16" if recipe == BF16 else "loss_fp8"
        logged = read_metrics(out / f"{recipe}-{seed}" / "metrics.jsonl")
        points = [(line["step"], round(line[key], 4)) for line in logged if line.get(key) is not None]
        steps, loss = ([*column] for column in zip(*points, strict=True))
        found.append({"recipe": recipe, "seed": seed, "steps": steps, "loss": loss})
    return found


def report_of(rows: Sequence[Row], out: Path) -> str:
    """Return the tables of the study and its loss gaps over time."""
    from octavo.lab.train.plot import plot

    parts = [by_recipe(rows)]
    if gaps := gap_curves(out, rows):
        parts += ["Training loss minus BF16's, nats per token, over tokens:", plot(gaps, unit="tokens").plain]
    return "\n\n".join(parts) + "\n"


def command(
    *,
    recipes: str = "bf16,folded,block,tensorwise",
    runs: Runs = RUNS,
    out: Path = Path("runs/parity"),
    output: Output = TO_STDOUT,
) -> int:
    """Train one model by several recipes and seeds, on the same batches, and compare held-out losses.

    Also reports the gap to BF16 of the same seeds with its intervals, tokens and time to equal loss, and the cosine of
    FP8 gradients with BF16 gradients. OUT keeps runs, curves.json and report.txt.

    Examples:

        octavo bench compare
        octavo bench compare --recipes bf16,folded --seeds 0,1,2 --steps 1000
        octavo bench compare --preset parity-350m-cuda --recipes bf16,folded,block
        octavo bench compare --preset tiny

    Parameters
    ----------
    recipes
        Recipes, separated by commas.
    out
        Directory for the runs.
    """
    rows = runs.rows(jobs(recipes.split(","), numbers(runs.seeds)), out, output.say)
    rows = add_evidence(rows, out, report=output.say)
    (out / "curves.json").write_text(json.dumps(curves(out, rows)), encoding="utf-8")
    report = report_of(rows, out)
    (out / "report.txt").write_text(report, encoding="utf-8")
    output.say(report)
    return output.finish(KIND, rows, recipes=recipes, **runs.given)
