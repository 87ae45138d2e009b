"""Parity: train one model by several recipes with several seeds and compare the held-out losses.

Runs of one seed start from the same weights and see the same batches, so that the recipe is all that differs; the
spread between the seeds in BF16 says what a difference means. `add_evidence` sets the finished runs side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.models.factory import model_name
from octavo.train.files import read_metrics
from octavo_bench.accuracy.curves import equal_loss, read_curve
from octavo_bench.accuracy.paired import over_sequences
from octavo_bench.accuracy.study import Job, heldout_losses, read_run, run_all

Row = dict[str, Any]


def run_parity(
    arguments: Sequence[str],
    recipes: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run `octavo train` for every recipe and seed and return one row each, as the result kind `parity` has them.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        out, slots, report: as for `run_all`.

    Raises:
        RunError, ConfigError: as `run_all`.
    """
    pairs = [(recipe, seed) for seed in seeds for recipe in recipes]
    jobs = [Job(f"{recipe}-{seed}", ("--recipe", recipe, "--seed", str(seed))) for recipe, seed in pairs]
    run_all(jobs, arguments, out=out, slots=slots, report=report)
    return [_row(recipe, seed, out / job.name) for (recipe, seed), job in zip(pairs, jobs, strict=True)]


def _row(recipe: str, seed: int, run: Path) -> Row:
    summary, config = read_run(run)
    lane = "bf16" if recipe == "bf16" else "fp8"
    return {
        "model": model_name(config["model"]["architecture"], summary["parameters"]),
        "tokens": summary["tokens"],
        "recipe": recipe,
        "seed": seed,
        "heldout_loss": summary[f"heldout_loss_{lane}"],
        "perplexity": summary[f"perplexity_{lane}"],
        "step_ms": summary[f"step_milliseconds_{lane}"],
        "tokens_per_second": summary["tokens_per_second"],
        "fp8_gemms": summary["fp8_gemms"],
        "fallbacks": summary["fallbacks"],
        "unigram_entropy": summary["unigram_entropy"],
        "heldout_tokens": config["run"]["eval_tokens"],
        "corpus_tokens": summary["corpus"].get("train_tokens"),
    }


def add_evidence(
    rows: Sequence[dict[str, Any]], out: Path, *, report: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Return the rows of `run_parity` with what sets each recipe beside BF16 of the same seed.

    Rows of BF16, and of seeds that BF16 was not trained with, stay as they are. The others take

        gap, gap_95                 held-out loss less BF16's, in nats; half of its 95 % interval over sequences
        tokens_ratio                tokens it needs for BF16's loss, in units of what BF16 needs (`curves`)
        loss_matched_speedup        time that BF16 needs for that loss, in units of what it needs itself
        cosine_...                  of gradients (`gradients`), measured once, with the first such seed

    Args:
        out: the directory of the runs.
    """
    bf16 = {row["seed"]: row for row in rows if row["recipe"] == "bf16"}
    compared = [row for row in rows if row["recipe"] != "bf16" and row["seed"] in bf16]
    cosines: dict[str, dict[str, Any]] = {}
    if compared:
        from octavo_bench.accuracy.gradients import gradient_cosines

        seed = compared[0]["seed"]
        report(f"gradients at the weights of bf16 seed {seed}")
        cosines = dict(gradient_cosines(out / f"bf16-{seed}", list(dict.fromkeys(row["recipe"] for row in compared))))
    beside = {id(row): _beside(row, bf16[row["seed"]], out) | cosines[row["recipe"]] for row in compared}
    return [row | beside.get(id(row), {}) for row in rows]


def _beside(row: Row, bf16: Row, out: Path) -> Row:
    mine, reference = out / f"{row['recipe']}-{row['seed']}", out / f"bf16-{row['seed']}"
    gap = over_sequences(heldout_losses(mine, "fp8"), heldout_losses(reference, "bf16"))
    equal = equal_loss(
        read_curve(read_metrics(mine / "metrics.jsonl"), "fp8"),
        read_curve(read_metrics(reference / "metrics.jsonl"), "bf16"),
    )
    return {
        "gap": gap.mean,
        **({} if gap.half_width is None else {"gap_95": gap.half_width}),
        "equal_loss": equal.loss,
        "tokens_ratio": equal.tokens_ratio,
        "loss_matched_speedup": bf16["step_ms"] / row["step_ms"] / equal.tokens_ratio,
    }


def gap_curves(out: Path, rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return for each recipe how its smoothed training loss less that of BF16 goes, by tokens, with the first seed."""
    seeds = {row["recipe"]: row["seed"] for row in reversed(rows) if "gap" in row}
    gaps = {}
    for recipe, seed in reversed(seeds.items()):
        mine = read_curve(read_metrics(out / f"{recipe}-{seed}" / "metrics.jsonl"), "fp8")
        reference = read_curve(read_metrics(out / f"bf16-{seed}" / "metrics.jsonl"), "bf16")
        pairs = zip(mine.tokens, mine.loss, reference.loss, strict=False)
        gaps[recipe] = [(tokens, a - b) for tokens, a, b in pairs]
    return gaps


def curves(out: Path, recipes: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the logged training loss of every run, one row each: recipe, seed, steps and losses."""
    rows = []
    for recipe in recipes:
        for seed in seeds:
            lines = (out / f"{recipe}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            logged = [line for line in map(json.loads, lines) if "step" in line]
            key = "loss_bf16" if recipe == "bf16" else "loss_fp8"
            points = [(line["step"], round(line[key], 4)) for line in logged if line.get(key) is not None]
            rows.append(
                {
                    "recipe": recipe,
                    "seed": seed,
                    "steps": [p[0] for p in points],
                    "loss": [p[1] for p in points],
                }
            )
    return rows
