"""`octavo bench data-parallel`: one model trained on one GPU and sharded over several, on the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cyclopts import Parameter

from octavo.errors import ConfigError
from octavo.recipes import load as load_recipe
from octavo_bench.implementations import BF16
from octavo_bench.kind import TO_STDOUT, Kind, Output, numbers
from octavo_bench.render import grouped, table
from octavo_bench.results import Row
from octavo_bench.study import Job, Runs

TITLES = (
    "recipe",
    "seed",
    "ranks",
    "one rank",
    "all ranks",
    "difference, 95 % over sequences",
    "gap to BF16, one rank",
    "gap to BF16, all ranks",
)


def by_ranks(rows: Sequence[Row]) -> str:
    """Return one line per recipe, seed and number of ranks: held-out loss beside that of one rank, and FP8's gaps."""
    parts = []
    for (model, tokens), of_model in grouped(rows, "model", "tokens").items():
        losses = {(row["recipe"], row["seed"], row["ranks"]): row["heldout_loss"] for row in of_model}
        body = []
        for row in (row for row in of_model if row["ranks"] > 1):
            recipe, seed, ranks = row["recipe"], row["seed"], row["ranks"]
            alone = losses[recipe, seed, 1]
            within = f" ± {100 * row['gap_95'] / alone:.2f} %" if "gap_95" in row else ""
            difference = f"{100 * row['gap'] / alone:+z.2f} %{within}"
            gaps = ["" if recipe == BF16 else _beside_bf16(losses, recipe, seed, count) for count in (1, ranks)]
            figures = (f"{alone:.4f}", f"{row['heldout_loss']:.4f}", difference)
            body.append((recipe, str(seed), str(ranks), *figures, *gaps))
        parts += [f"**{model}, {tokens:,} tokens**: held-out loss, nats per token", table(TITLES, body)]
    return "\n\n".join(parts)


def _beside_bf16(losses: Mapping[tuple[str, int, int], float], recipe: str, seed: int, ranks: int) -> str:
    bf16 = losses.get((BF16, seed, ranks))
    return "" if bf16 is None else f"{100 * (losses[recipe, seed, ranks] / bf16 - 1):+z.2f} %"


KIND = Kind(
    name="data-parallel",
    keys={"model": str, "tokens": int, "recipe": str, "seed": int, "ranks": int, "heldout_loss": float},
    show=by_ranks,
    may_fail=False,
    session=("hardware", "model", "tokens", "seed"),  # FP8 beside BF16, and several ranks beside one
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRuns(Runs):
    """Flags of a study's runs on one GPU and on several."""

    seeds: str = "0"
    """Seeds, separated by commas. Runs of one seed share weights and batches."""
    preset: str = "parity-10m-cuda"
    """Preset of all runs."""


RUNS = ShardedRuns()


def jobs(recipes: Sequence[str], seeds: Sequence[int], ranks: int) -> list[Job]:
    """Return, per recipe and seed, a run on one rank and one on several ranks, which is compared with it."""
    graph = ("--graph", "on") if torch.cuda.is_available() else ()  # by default only runs of one GPU are replayed
    return [
        Job(
            {"recipe": recipe, "seed": seed, "ranks": count},
            ("--recipe", recipe, "--seed", str(seed), *graph),
            "" if count == 1 else f"{recipe}-{seed}-1",
            count,
        )
        for seed in seeds
        for recipe in recipes
        for count in (1, ranks)
    ]


def command(
    *,
    recipes: str = "bf16,folded",
    ranks: int = 2,
    runs: ShardedRuns = RUNS,
    out: Path = Path("runs/data-parallel"),
    output: Output = TO_STDOUT,
) -> int:
    """Train one model on one GPU and sharded over several, on the same batches, and compare losses.

    Runs on several ranks are as with `torchrun`: FSDP2, each rank with its part of every batch. On GPUs forward and
    backward are replayed as a CUDA graph. Without GPUs the ranks are processes on the CPU.

    Examples:

        octavo bench data-parallel --write benchmarks/results
        octavo bench data-parallel --ranks 4 --steps 3000
        octavo bench data-parallel --preset tiny

    Parameters
    ----------
    recipes
        Recipes, separated by commas.
    ranks
        Ranks that share the model.
    out
        Directory for the runs.
    """
    if ranks < 2:
        raise ConfigError(f"--ranks: a sharded run needs two or more ranks, not {ranks}.")
    if 0 < torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--ranks: {ranks} ranks need as many GPUs, and this machine has {torch.cuda.device_count()}."
        )
    names = [*dict.fromkeys(recipes.split(","))]
    for name in names:
        load_recipe(name, "--recipes")
    rows = runs.rows(jobs(names, numbers(runs.seeds), ranks), out, output.say)
    output.say(by_ranks(rows))
    return output.finish(KIND, rows, recipes=recipes, ranks=ranks, **runs.given)
