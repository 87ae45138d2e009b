"""What storage costs in loss: one model trained with every tier of optimizer states, on the same batches.

Weights are kept in BF16 beside the optimizer's master, so that each tier keeps what it is named for. The last two keep
everything in FP8: weights and gradients too. All compute in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, did_you_mean
from octavo.models.factory import model_name
from octavo_bench.accuracy.paired import over_sequences
from octavo_bench.accuracy.study import Job, heldout_losses, read_run, run_all

Row = dict[str, Any]

PEER = "fp32"
"""What the others are compared with."""
_ALL_FP8 = ("--weights", "fp8", "--gradients", "fp8")
TIERS: dict[str, tuple[str, ...]] = {
    PEER: ("--weights", "bf16", "--states", "fp32"),
    "exact": ("--weights", "bf16", "--states", "exact"),
    "fp8-lm": ("--weights", "bf16", "--states", "fp8-lm"),
    "fp8": ("--weights", "bf16", "--states", "fp8"),
    "fp8-min": ("--weights", "bf16", "--states", "fp8-min"),
    "fp8, all": (*_ALL_FP8, "--states", "fp8"),
    "fp8-min, all": (*_ALL_FP8, "--states", "fp8-min"),
}
"""Flags of `octavo train` by name. `all`: weights and gradients in FP8, too."""


def run_tiers(
    arguments: Sequence[str],
    tiers: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> list[Row]:
    """Run `octavo train` for every tier and seed and return one row each, as the result kind `tiers` has them.

    Rows of seeds that `fp32` was trained with, too, have `gap` and `gap_95`: held-out loss less its, in nats, and half
    of the 95 % interval over sequences.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        tiers: names in `TIERS`.
        out, slots, report: as for `run_all`.

    Raises:
        ConfigError: an unknown tier, or as `run_all`.
        RunError: as `run_all`.
    """
    for name in tiers:
        if name not in TIERS:
            raise ConfigError(f"there is no tier '{name}'.{did_you_mean(name, TIERS)} Tiers: {'; '.join(TIERS)}.")
    pairs = [(tier, seed) for seed in seeds for tier in tiers]
    jobs = [Job(_folder(tier, seed), (*TIERS[tier], "--seed", str(seed))) for tier, seed in pairs]
    run_all(jobs, arguments, out=out, slots=slots, report=report)
    return [_row(tier, seed, out) for tier, seed in pairs]


def _folder(tier: str, seed: int) -> str:
    return f"{tier.replace(', ', '-')}-{seed}"


def _row(tier: str, seed: int, out: Path) -> Row:
    run, peer = out / _folder(tier, seed), out / _folder(PEER, seed)
    summary, config = read_run(run)
    row = {
        "model": model_name(config["model"]["architecture"], summary["parameters"]),
        "tokens": summary["tokens"],
        "recipe": config["run"]["recipe"],
        "states": tier,
        "seed": seed,
        "heldout_loss": summary["heldout_loss_fp8"],
        "step_ms": summary["step_milliseconds_fp8"],
        "heldout_tokens": config["run"]["eval_tokens"],
        "fallbacks": summary["fallbacks"],
    }
    if tier != PEER and (peer / "heldout.json").exists():
        gap = over_sequences(heldout_losses(run, "fp8"), heldout_losses(peer, "fp8"))
        row |= {"gap": gap.mean} | ({} if gap.half_width is None else {"gap_95": gap.half_width})
    return row
