"""`octavo bench tiers`: one model trained with every tier of optimizer states, on the same batches.

Weights are stored in BF16 beside the optimizer's master; the last two tiers also have FP8 weights and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, numbers
from octavo_bench.render import grouped, table
from octavo_bench.results import Row
from octavo_bench.study import RUNS, Job, Runs, by_seed, mean_cell, seed_cells, seed_titles

PEER = "fp32"
"""The baseline."""
_ALL_FP8 = ("--weights", "fp8", "--gradients", "fp8")
TIERS: dict[str, tuple[str, ...]] = {
    **{name: ("--weights", "bf16", "--states", name) for name in (PEER, "exact", "fp8-lm", "fp8", "fp8-min")},
    "fp8, all": (*_ALL_FP8, "--states", "fp8"),
    "fp8-min, all": (*_ALL_FP8, "--states", "fp8-min"),
}
"""Flags of `octavo train` by name. `all`: weights and gradients in FP8, too."""


def by_tier(rows: Sequence[Row]) -> str:
    """Return one line per tier of optimizer states: held-out loss of each seed, and the gap to FP32 states."""
    parts = []
    for (model, tokens), of_model in grouped(rows, "model", "tokens").items():
        seeds, body = sorted({row["seed"] for row in of_model}), []
        for (states,), own in grouped(of_model, "states").items():
            beside = [f"{100 * row['gap'] / row['heldout_loss']:+z.2f} %" for row in own if "gap" in row]
            within = mean_cell(own, "gap_95", "± {:.3f} %")
            body.append((states, *seed_cells(by_seed(own), seeds), ", ".join(beside), within))
        header = ("states", *seed_titles(seeds), "gap to fp32, by seed", "95 % over sequences")
        first = [row["heldout_loss"] for row in of_model if row["states"] == of_model[0]["states"]]
        apart = f"The {len(first)} seeds of `{of_model[0]['states']}` lie {max(first) - min(first):.4f} apart."
        title = f"**{model}, {tokens:,} tokens**: held-out loss, nats per token"
        parts += [title, table(header, body), *([apart] if len(first) > 1 else [])]
    return "\n\n".join(parts)


KIND = Kind(
    name="tiers",
    keys={"model": str, "tokens": int, "states": str, "seed": int, "heldout_loss": float},
    show=by_tier,
    may_fail=False,
)


def jobs(states: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Return a run per tier and seed, each paired with FP32 of its seed."""
    return [
        Job(
            {"states": known("--states", name, TIERS, "tier"), "seed": seed},
            (*TIERS[name], "--seed", str(seed)),
            "" if name == PEER else f"{PEER}-{seed}",
        )
        for seed in seeds
        for name in states
    ]


def command(
    *, states: Names = (), runs: Runs = RUNS, out: Path = Path("runs/tiers"), output: Output = TO_STDOUT
) -> int:
    """Train one model with every tier of optimizer states, on the same batches, and compare held-out losses.

    Examples:

        octavo bench tiers
        octavo bench tiers --states fp32 --states fp8 --seeds 0,1,2
        octavo bench tiers --preset tiny

    Parameters
    ----------
    states
        Tiers, and `fp8, all` and `fp8-min, all` for those with FP8 weights and gradients; all by default.
    out
        Directory for the runs.
    """
    rows = runs.rows(jobs(states or [*TIERS], numbers(runs.seeds)), out, output.say)
    output.say(by_tier(rows))
    return output.finish(KIND, rows, states=states, **runs.given)
