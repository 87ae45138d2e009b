"""What the pairs of `octavo bench parity` show: gaps with intervals that hold at any time, verdicts, tables.

docs/explanation/parity-protocol.md has the reasons and the sources of the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from octavo_bench.evidence import at_any_time, over_seeds
from octavo_bench.lanes import BF16, NULL
from octavo_bench.render import grouped, table
from octavo_bench.results import Row

PROTOCOL = 1
"""Number of the protocol. Runs of another are not pooled with these."""
GATE = 0.10
"""Percent: a recipe passes when the interval of its gap lies within plus and minus this."""
ALL = "mean of the recipes"
BLOCK = ("model", "tokens", "seed", "text", "machine")
"""Keys that the runs of a block share."""
_POWER = 0.8416
"""The 80 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The paired gap of an arm, in percent of BF16's held-out loss."""

    arm: str
    differences: tuple[float, ...]
    """One per block."""
    failures: int
    """Blocks in which this arm's loss was not finite and BF16's was."""

    @property
    def mean(self) -> float:
        """Mean over the blocks."""
        return fmean(self.differences)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the blocks; None for one."""
        return stdev(self.differences) if len(self.differences) > 1 else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval that holds at any time; None while it is unbounded."""
        return at_any_time(self.differences).half_width

    @property
    def half_width_once(self) -> float | None:
        """Half of the 95 % interval for a single look: Student's t."""
        return over_seeds(self.differences).half_width

    @property
    def visible(self) -> float | None:
        """Smallest true gap that this many pairs show, by an interval without 0, in four studies of five."""
        if self.half_width is None or self.spread is None:
            return None
        return self.half_width + _POWER * self.spread / math.sqrt(len(self.differences))

    @property
    def verdict(self) -> str:
        """Verdict by the gate."""
        if self.failures:
            return "fails: diverged"
        if self.half_width is None:
            return "open"
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if low >= -GATE and high <= GATE:
            return "passes"
        if low > GATE or high < -GATE:
            return "fails"
        return "a gap, of open size" if low > 0 or high < 0 else "open"


def gaps(rows: Sequence[Row], loss: str = "heldout_loss") -> list[Gap]:
    """Return the gaps of one model's arms: the null, the mean of the recipes, and each recipe.

    A recipe is compared with the mean of both BF16 runs of its block, the null with the first. A block whose BF16 did
    not stay finite is left out. The mean of the recipes takes blocks that have all of them.

    Args:
        rows: runs of one model and one number of tokens.
        loss: key of the compared loss.
    """
    recipes = [recipe for recipe in dict.fromkeys(row["recipe"] for row in rows) if recipe not in (BF16, NULL)]
    found: dict[str, list[float]] = {arm: [] for arm in (NULL, ALL, *recipes)}
    failures = dict.fromkeys(found, 0)
    for block in blocks(rows):
        if any("error" in block.get(arm, {"error": ""}) for arm in (BF16, NULL)):
            continue
        first, second = block[BF16]["heldout_loss"], block[NULL]["heldout_loss"]
        found[NULL].append(100 * (second / first - 1))
        own = {}
        for recipe in recipes:
            if "error" in block.get(recipe, {}):
                failures[recipe] += 1
            elif recipe in block:
                own[recipe] = 100 * (block[recipe][loss] / fmean((first, second)) - 1)
                found[recipe].append(own[recipe])
        if len(own) == len(recipes) > 1:
            found[ALL].append(fmean(own.values()))
    return [Gap(arm, tuple(values), failures[arm]) for arm, values in found.items() if values or failures[arm]]


def blocks(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return the runs of each block by arm."""
    return [{row["recipe"]: row for row in of_block} for of_block in grouped(rows, *BLOCK).values()]


def report(rows: Sequence[Row]) -> str:
    """Return, per model, a table of the gaps with intervals and verdicts, and the losses by language."""
    by_model = sorted(grouped(rows, "model", "tokens").items(), key=lambda item: item[0][1])
    if not by_model:
        return "No pairs yet."
    return "\n\n".join(_of_model(model, tokens, own) for (model, tokens), own in by_model)


HEADER = (
    "recipe",
    "pairs",
    "gap",
    "95 % at any time",
    "95 % for one look",
    "spread of pairs",
    "smallest gap that would show",
    f"within ± {GATE:.2f} %",
    "gap of its weights in BF16",
)


def _of_model(model: str, tokens: int, rows: Sequence[Row]) -> str:
    in_bf16 = {gap.arm: gap for gap in gaps(_with_bf16(rows), "heldout_bf16_loss")}
    body = [_line(gap, in_bf16.get(gap.arm)) for gap in gaps(rows)]
    hours = sum(row.get("seconds", 0.0) for row in rows) / 3600
    losses = [row["heldout_loss"] for row in rows if row["recipe"] == BF16 and "error" not in row]
    bf16 = f"BF16's held-out loss is {fmean(losses):.4f} nats per token" if losses else "BF16 has no finite loss"
    spread = f", its seeds spread by {100 * stdev(losses) / fmean(losses):.2f} %" if len(losses) > 1 else ""
    return f"**{model}, {tokens:,} tokens**\n\n{table(HEADER, body)}\n\n{bf16}{spread}. Hours of training: {hours:.2f}."


def _with_bf16(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have the loss of their weights in BF16, with the BF16 runs."""
    return [row for row in rows if "heldout_bf16_loss" in row or row["recipe"] in (BF16, NULL)]


def _line(gap: Gap, in_bf16: Gap | None) -> tuple[str, ...]:
    verdict = "" if gap.arm == NULL else gap.verdict
    if not gap.differences:
        return gap.arm, "0", "", "", "", "", "", verdict, ""
    return (
        gap.arm,
        str(len(gap.differences)),
        f"{gap.mean:+.3f} %",
        _percent(gap.half_width, "± ") or "unbounded",
        _percent(gap.half_width_once, "± "),
        _percent(gap.spread),
        _percent(gap.visible),
        verdict,
        f"{in_bf16.mean:+.3f} % ± {in_bf16.half_width:.3f} %" if in_bf16 and in_bf16.half_width else "",
    )


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{sign}{value:.3f} %"
