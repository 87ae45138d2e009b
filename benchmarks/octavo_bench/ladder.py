"""Evaluation of the pairs of `octavo bench parity`: gaps with anytime-valid intervals, verdicts, tables.

docs/explanation/parity-protocol.md has the reasons and the sources of the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.factory import model_name
from octavo.lab.train.evaluate import student
from octavo.recipes import DEFAULT
from octavo_bench.evidence import LEVEL, at_any_time, errors_at_any_time, fit, over_seeds
from octavo_bench.installed_text import HELDOUT_BYTES, HELDOUT_SHARE
from octavo_bench.kind import known
from octavo_bench.lanes import BF16, CONTROL, Training
from octavo_bench.render import grouped, table
from octavo_bench.results import Result, Row, load

PROTOCOL = 3
"""Version of the protocol."""
POOLED = (2, PROTOCOL)
"""Versions whose runs are made alike and pooled; those of the first are the pilot."""
FIRST_SEED = 100
"""Seeds below are the pilot's."""
FRESH = 0.2
"""Last share of a run over which the training loss is averaged."""
LOSSES = {"fresh_loss": "training loss over the last fifth", "heldout_loss": "held-out loss"}
"""Losses of gaps by key: the first that all runs have decides."""
NAME = "ladder"
"""Kind of the result files of the runs."""
MARGIN = 0.10
"""Equivalence margin, percent: a recipe passes when the interval of its gap lies within plus and minus this."""
AIM = 0.05
"""Target half width of an interval, percent."""
ALL = "mean of the recipes"
AVERAGED = ("folded", "folded_fast", "block", "tensorwise", "rowwise")
"""Recipes of the first question: all of fprop in E4M3, by different scales and sums."""
INCONCLUSIVE = "inconclusive"
STUDY = ("model", "tokens", "condition")
"""Keys that the runs of a study share: one row of gaps per recipe."""
BLOCK = (*STUDY, "seed", "text", "machine")
"""Keys that the runs of a block share."""
RUN = ("protocol", *BLOCK, "recipe")
"""Keys that identify a run."""


def _llama(dim: int, layers: int, ffn: int, sequence: int) -> ModelConfig:
    return ModelConfig(vocab=272, dim=dim, layers=layers, heads=max(1, dim // 64), ffn=ffn, sequence=sequence)


def _moe(dim: int, layers: int, ffn: int, sequence: int, **changes: int) -> ModelConfig:
    return replace(_llama(dim, layers, ffn, sequence), architecture="moe", **changes)  # type: ignore[arg-type]


SIZES = {
    "tiny": Training(model=_llama(32, 1, 64, 32), batch=8, lr=3e-3, tokens_per_parameter=1.0),
    "tiny-bpe": Training(model=replace(_llama(32, 1, 64, 32), vocab=512), batch=8, lr=3e-3, tokens_per_parameter=1.0),
    "moe-tiny": Training(
        model=_moe(32, 1, 32, 32, experts=4, experts_per_token=2), batch=8, lr=3e-3, tokens_per_parameter=1.0
    ),
    "1m": Training(model=_llama(128, 4, 384, 512), batch=32, lr=3e-3),
    "3m": Training(model=_llama(256, 4, 768, 512), batch=64, lr=2e-3),
    "3m-bpe": Training(
        model=replace(_llama(256, 4, 768, 512), vocab=4096), batch=64, lr=2e-3, tokens_per_parameter=10.0
    ),
    "10m": Training(model=_llama(384, 6, 1024, 512), batch=128, lr=1.5e-3),
    "30m": Training(model=_llama(512, 9, 1408, 1024), batch=128, lr=1e-3, together=False),
    "130m": Training(model=_llama(1024, 10, 2816, 1024), batch=128, lr=8e-4, tokens_per_parameter=8.0, together=False),
    "350m": Training(model=_llama(1024, 24, 3328, 1024), batch=32, lr=6e-4, tokens_per_parameter=4.0, together=False),
    "1b": Training(model=_llama(2048, 20, 5632, 1024), batch=24, lr=3e-4, tokens_per_parameter=1.2, together=False),
    "moe-1m": Training(model=_moe(128, 4, 256, 512), batch=32, lr=3e-3),
    "moe-3m": Training(model=_moe(256, 4, 384, 512), batch=64, lr=2e-3),
    "moe-100m": Training(
        model=_moe(768, 12, 512, 1024, experts=32, experts_per_token=4, shared_experts=1),
        batch=64,
        lr=6e-4,
        tokens_per_parameter=4.0,
        together=False,
    ),
}
"""Sizes of the ladder by name, mixtures of experts by their active parameters; `3m-bpe` is `3m` with 4,096 ids in place
of bytes. `tiny`, `tiny-bpe` and `moe-tiny`, for trying the command on a CPU, are not part of the evidence."""
CONDITIONS: Mapping[str, Callable[[Training], Mapping[str, Any]]] = {
    "whole": lambda own: {},
    "half": lambda own: {"branch": 0.5},
    "quarter": lambda own: {"branch": 0.25},
    "tenth": lambda own: {"branch": 0.1},
    "lr2": lambda own: {"lr": 2 * own.lr},
    "lr4": lambda own: {"lr": 4 * own.lr},
    "batch4": lambda own: {"batch": 4 * own.batch},
    "outliers": lambda own: {"outliers": 16.0},
    "short": lambda own: {"tokens_per_parameter": own.tokens_per_parameter / 4},
    "tuned": lambda own: {
        "tuned": "all weights",
        "lr": own.lr / 10,
        "tokens_per_parameter": own.tokens_per_parameter / 10,
    },
    "lora": lambda own: {"tuned": "LoRA", "lr": own.lr, "tokens_per_parameter": own.tokens_per_parameter / 10},
}
"""Condition -> changes of a size of the ladder; several are joined by `+`."""
_POWER = 0.8416
"""The 80 % quantile of the normal distribution."""


def sizes_by_model() -> dict[str, Training]:
    """Return the sizes of the ladder by the model's name in result files."""
    return {model_name_of(own): own for own in SIZES.values()}


def model_name_of(training: Training) -> str:
    """Return the name of a size's model in result files."""
    return model_name(training.model.architecture, training.parameters)


def under(condition: str, training: Training) -> Training:
    """Return a size under a condition: names of `CONDITIONS`, joined by `+`.

    Raises:
        ConfigError: there is no such condition, or a fine-tuning would continue BF16's run.
    """
    for name in condition.split("+"):
        training = replace(training, **CONDITIONS[known("--conditions", name, [*CONDITIONS], "condition")](training))
    if training.tuned and training.branch:
        raise ConfigError(f"--conditions: '{condition}': a fine-tuning starts from its base model, not from a branch.")
    return training


@dataclass(frozen=True, slots=True)
class Gap:
    """The paired gap of an arm, in percent of BF16's loss."""

    arm: str
    differences: tuple[float, ...]
    """One per block."""
    failures: int
    """Blocks with a non-finite loss of this arm and a finite loss of BF16."""

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
        """Half width of the anytime-valid 95 % interval; None while it is unbounded."""
        return at_any_time(self.differences).half_width

    @property
    def half_width_once(self) -> float | None:
        """Half width of the 95 % interval for a number of pairs fixed in advance: Student's t."""
        return over_seeds(self.differences).half_width

    @property
    def detectable(self) -> float | None:
        """Minimum detectable gap: at this number of pairs the interval excludes 0 with 80 % power."""
        if self.half_width is None or self.spread is None:
            return None
        return self.half_width + _POWER * self.spread / math.sqrt(len(self.differences))

    @property
    def wanted(self) -> int | None:
        """Number of pairs for an anytime-valid interval of half width `AIM`, if pairs keep this standard deviation."""
        return None if not self.spread else pairs_for(AIM / self.spread)

    @property
    def verdict(self) -> str:
        """Verdict by the equivalence margin."""
        if self.failures:
            return "fails: diverged"
        if self.half_width is None:
            return INCONCLUSIVE
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if low >= -MARGIN and high <= MARGIN:
            return "passes"
        if low > MARGIN or high < -MARGIN:
            return "fails"
        return f"{INCONCLUSIVE}, nonzero" if low > 0 or high < 0 else INCONCLUSIVE

    @property
    def is_skewed(self) -> bool:
        """Whether the pairs are too skewed for the interval, which is exact for normal ones: see `skew_bound`."""
        count, spread = len(self.differences), self.spread
        if count < FEWEST_FOR_SKEW or not spread:
            return False
        third = sum(((x - self.mean) / spread) ** 3 for x in self.differences)
        return abs(count / ((count - 1) * (count - 2)) * third) > skew_bound(count)

    @property
    def flagged_verdict(self) -> str:
        """The verdict for tables, with a flag if the pairs are skewed; of the control the flag alone."""
        verdict = "" if self.arm == CONTROL else self.verdict
        return ", ".join(filter(None, (verdict, "skewed" if self.is_skewed else "")))


FEWEST_FOR_SKEW = 5
"""Fewest pairs whose skewness is judged: those of the first bounded interval."""


def skew_bound(pairs: int) -> float:
    """Return the 95 % bound of the skewness of normal pairs: 1.96 of its standard errors (Joanes and Gill 1998)."""
    n = pairs
    return 1.96 * math.sqrt(6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3)))


def is_settled(rows: Sequence[Row], arms: Sequence[str]) -> bool:
    """Return whether every recipe of these arms passes or fails in the runs of a study."""
    found = {gap.arm: gap.verdict for gap in gaps(rows)} if rows else {}
    return all(
        found.get(arm, INCONCLUSIVE).startswith(("passes", "fails")) for arm in arms if arm not in (BF16, CONTROL)
    )


def pairs_for(half_width: float) -> int:
    """Return the smallest number of pairs for an anytime-valid half width, in standard deviations of a pair."""
    pairs = 5
    while (errors_at_any_time(pairs) or math.inf) > half_width * math.sqrt(pairs):
        pairs += max(1, pairs // 50)
    return pairs


def decisive(rows: Sequence[Row]) -> str:
    """Return the key of the decisive loss: the fresh one, if all runs have it."""
    return next(key for key in LOSSES if all(key in row for row in rows if "error" not in row) or key == [*LOSSES][-1])


def gaps(
    rows: Sequence[Row], loss: str | None = None, baseline: str | None = None, beside: str | None = None
) -> list[Gap]:
    """Return the gaps of one study's arms: the control, the mean of the recipes, and each recipe.

    Recipes are compared with the mean of both BF16 runs of their block, the control with the first. Blocks with a
    non-finite BF16 run are left out. The mean of the recipes is over those of `AVERAGED` that the study has, in blocks
    that have all of these.

    Args:
        rows: runs of one study.
        loss: key of the compared loss, by default the decisive one.
        baseline: key of BF16's loss, if different.
        beside: key of the reference in a recipe's own row, in place of BF16's runs.

    Raises:
        ConfigError: the rows are of several studies, whose gaps must not be pooled.
    """
    if len(studies := [*grouped(rows, *STUDY)]) > 1:
        raise ConfigError(f"gaps of several studies are not pooled: {studies}. Take them one by one.")
    loss = loss or decisive(rows)
    named = [recipe for recipe in dict.fromkeys(row["recipe"] for row in rows) if recipe not in (BF16, CONTROL)]
    unchanged = [recipe for recipe in named if "+" not in recipe]
    recipes = [*unchanged, *sorted(recipe for recipe in named if "+" in recipe)]
    averaged = {*AVERAGED} & {*recipes}
    found: dict[str, list[float]] = {arm: [] for arm in (CONTROL, ALL, *recipes)}
    failures = dict.fromkeys(found, 0)
    for block in blocks(rows):
        if any("error" in block.get(arm, {"error": ""}) for arm in (BF16, CONTROL)):
            continue
        first, second = (block[arm][baseline or loss] for arm in (BF16, CONTROL))
        found[CONTROL].append(100 * (second / first - 1))
        own = {}
        for recipe in recipes:
            if "error" in block.get(recipe, {}):
                failures[recipe] += 1
            elif recipe in block:
                reference = block[recipe][beside] if beside else fmean((first, second))
                own[recipe] = 100 * (block[recipe][loss] / reference - 1)
                found[recipe].append(own[recipe])
        if len(averaged) > 1 and own.keys() >= averaged:
            found[ALL].append(fmean(own[recipe] for recipe in averaged))
    return [Gap(arm, tuple(values), failures[arm]) for arm, values in found.items() if values or failures[arm]]


def blocks(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return the runs of each block by arm."""
    return [{row["recipe"]: row for row in of_block} for of_block in grouped(rows, *BLOCK).values()]


def studies(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the runs of each study, smaller models first."""
    return [own for _, own in sorted(grouped(rows, *STUDY).items(), key=lambda item: item[0][1:])]


def report(rows: Sequence[Row]) -> str:
    """Return, per study, a table of the gaps with intervals and verdicts."""
    return "\n\n".join(_of_study(own) for own in studies(rows)) or "No pairs yet."


HEADER = (
    "recipe",
    "pairs",
    "gap",
    "95 %, anytime-valid",
    "95 %, fixed n",
    "standard deviation",
    "minimum detectable gap",
    f"pairs for ± {AIM:.2f} %",
    f"margin ± {MARGIN:.2f} %",
)
CROSSED = (
    "held-out gap",
    "FP8 model, as trained",
    "FP8 model, in BF16",
    "BF16 model, in FP8",
    "both in FP8",
    f"both in FP8: margin ± {MARGIN:.2f} %",
)


def _of_study(rows: Sequence[Row]) -> str:
    model, tokens, condition = (rows[0][key] for key in STUDY)
    loss = decisive(rows)
    body = [_line(gap) for gap in gaps(rows, loss)]
    hours = sum(row.get("seconds", 0.0) for row in rows) / 3600
    losses = [row[loss] for row in rows if row["recipe"] == BF16 and "error" not in row]
    bf16 = f"BF16's {LOSSES[loss]} is {_in_nats(losses, rows[0])}" if losses else "BF16 has no finite loss"
    spread = f", standard deviation over seeds {100 * stdev(losses) / fmean(losses):.2f} %" if len(losses) > 1 else ""
    title = f"**{model}, {tokens:,} tokens, {condition}: {LOSSES[loss]}**"
    tables = "\n\n".join(filter(None, (table(HEADER, body), _crossed(rows))))
    return f"{title}\n\n{tables}\n\n{bf16}{spread}. Training time: {hours:.2f} h.{_by_code(rows)}"


def _by_code(rows: Sequence[Row]) -> str:
    """Return a sentence on the blocks of each version of the code; empty if all are of one."""
    counts = Counter(str(row.get("package", "unrecorded code")) for row in rows if row["recipe"] == BF16)
    if len(counts) < 2:
        return ""
    return f" Blocks by code: {', '.join(f'{count} of {name}' for name, count in counts.items())}."


def _in_nats(losses: Sequence[float], row: Row) -> str:
    """Return a mean loss per token, and per byte of a tokenised text, of which a gap in percent is the same."""
    per_byte = f", {fmean(losses) / row['bytes_per_token']:.4f} per byte" if "bytes_per_token" in row else ""
    return f"{fmean(losses):.4f} nats per token{per_byte}"


def _crossed(rows: Sequence[Row]) -> str:
    """Return a table of the held-out gaps of both models in both precisions; empty if only one was evaluated."""
    if not any("heldout_bf16_loss" in row for row in rows):
        return ""
    keys = ("heldout_loss", "heldout_bf16_loss", "heldout_of_bf16_loss")
    found = [{gap.arm: gap for gap in gaps(_with(rows, key), key, "heldout_loss")} for key in keys]
    in_fp8 = {gap.arm: gap for gap in served(rows)}
    body = []
    for arm in found[0]:
        cells = [interval(own.get(arm)) for own in found] if arm != CONTROL else [interval(found[0][arm]), "", ""]
        both = in_fp8.get(arm)
        body.append((arm, *cells, interval(both), both.flagged_verdict if both else ""))
    return table(CROSSED, body)


def served(rows: Sequence[Row]) -> list[Gap]:
    """Return the gaps of recipes, evaluated in FP8, to BF16's weights evaluated by the same recipe.

    Runs that ended with another recipe are evaluated by the initial one.
    """
    key, own = "heldout_of_bf16_loss", "own_in_fp8"
    known = [row | {own: row.get("heldout_fp8_loss", row["heldout_loss"])} if key in row else row for row in rows]
    return [gap for gap in gaps(_with(known, key), own, "heldout_loss", beside=key) if gap.arm != CONTROL]


def _with(rows: Sequence[Row], loss: str) -> list[Row]:
    """Return the rows with this loss, the failed ones, and the BF16 runs."""
    return [row for row in rows if loss in row or "error" in row or row["recipe"] in (BF16, CONTROL)]


REMEDY = ("folded", "folded+run.last_share=0.3")
"""The recipe in FP8 alone, and the same with the remedy of its gap."""
SUMMARY = (DEFAULT, *REMEDY)
"""Recipes of the summary: the default, the one in FP8 alone, and its main remedy."""


def summary_table(directory: Path) -> str:
    """Return a line per study with the gaps and verdicts of `SUMMARY`; empty without pairs."""
    body = []
    for own in sorted(studies(read_rows(directory)), key=lambda rows: str(rows[0]["condition"])):
        found = {gap.arm: gap for gap in gaps(own) if gap.differences}
        shown = [found.get(arm) for arm in SUMMARY]
        if any(shown):
            cells = (
                (str(len(gap.differences)), interval(gap), gap.flagged_verdict) if gap else ("",) * 3 for gap in shown
            )
            body.append((own[0]["condition"], own[0]["model"], *chain.from_iterable(cells)))
    header = ("condition", "model", *chain.from_iterable(("pairs", f"`{arm}`", "verdict") for arm in SUMMARY))
    return table(header, body) if body else ""


def post_hoc_table(directory: Path, condition: str = "whole") -> str:
    """Return the paired difference of `folded` and its remedy in whole runs, in percent of BF16's loss; empty if none.

    The protocol does not have it: both gaps had been seen before the comparison was made.
    """
    body = []
    for rows in studies([row for row in read_rows(directory) if row["condition"] == condition]):
        if (gap := difference(rows, *REMEDY)).differences:
            body.append((condition, str(rows[0]["model"]), str(len(gap.differences)), interval(gap)))
    return table(("condition", "model", "pairs", f"`{REMEDY[0]}` less `{REMEDY[1]}`"), body) if body else ""


def difference(rows: Sequence[Row], one: str, other: str) -> Gap:
    """Return the paired difference of two arms of a study, in percent of the mean of both BF16 runs."""
    loss, differences = decisive(rows), []
    for block in blocks(rows):
        if all("error" not in block.get(arm, {"error": ""}) for arm in (BF16, CONTROL, one, other)):
            bf16 = fmean((block[BF16][loss], block[CONTROL][loss]))
            differences.append(100 * (block[one][loss] - block[other][loss]) / bf16)
    return Gap(one, tuple(differences), 0)


def interval(gap: Gap | None) -> str:
    """Return a mean gap and its anytime-valid half width in percent; empty without pairs."""
    if gap is None or not gap.differences:
        return ""
    width = "" if gap.half_width is None else f" ± {gap.half_width:.3f} %"
    return f"{gap.mean:+.3f} %{width}"


def _line(gap: Gap) -> tuple[str, ...]:
    verdict = gap.flagged_verdict
    if not gap.differences:
        return gap.arm, "0", *[""] * 6, verdict
    return (
        gap.arm,
        str(len(gap.differences)),
        f"{gap.mean:+.3f} %",
        _percent(gap.half_width, "± ") or "unbounded",
        _percent(gap.half_width_once, "± "),
        _percent(gap.spread),
        _percent(gap.detectable),
        f"{gap.wanted:,}" if gap.wanted else "",
        verdict,
    )


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{sign}{value:.3f} %"


def size_table() -> str:
    """Return the sizes of the ladder and their training settings."""
    header = (
        "size",
        "parameters",
        "active",
        "dim",
        "layers",
        "ffn",
        "sequence",
        "tokens per active parameter",
        "tokens",
    )
    body = []
    for name, own in SIZES.items():
        if "tiny" in name:
            continue
        model, ratio, ffn = own.model, f"{own.tokens_per_parameter:g}", f"{own.model.ffn_dim:,}"
        if model.architecture == "moe":
            shared = f" + {model.shared_experts}" if model.shared_experts else ""
            ffn = f"{model.experts_per_token} of {model.experts}{shared} experts of {ffn}"
        shape = (f"{model.dim:,}", str(model.layers), ffn, f"{model.sequence:,}")
        rest = (f"{own.batch * model.sequence:,}", f"{own.lr:g}")
        counts = (f"{own.parameters:,}", f"{own.active:,}")
        body.append((f"`{name}`", *counts, *shape, ratio, f"{own.tokens:,}", f"{own.steps:,}", *rest))
    return table((*header, "steps", "tokens per step", "peak learning rate"), body)


def constant_table() -> str:
    """Return the constants of the protocol."""
    own = next(iter(SIZES.values()))
    body = (
        ("protocol", str(PROTOCOL)),
        ("equivalence margin for the mean gap", f"± {MARGIN:.2f} %"),
        ("primary loss", f"{LOSSES['fresh_loss']} if no text is repeated, else held-out loss"),
        ("first seed", str(FIRST_SEED)),
        ("confidence level", f"{1 - LEVEL:.0%}".replace("%", " %")),
        ("target half width of the interval", f"± {AIM:.2f} %"),
        ("warm-up of the learning rate", f"{100 * own.warmup:g} % of the steps"),
        ("held-out documents", f"{100 * HELDOUT_SHARE:g} %, up to {HELDOUT_BYTES:,} bytes per language"),
    )
    return table(("fixed", "value"), body)


def interval_table() -> str:
    """Return half widths of the 95 % intervals and minimum detectable gaps, in standard deviations of a pair."""
    header = ("pairs", "half width, anytime-valid", "half width, fixed n", "minimum detectable gap, 80 % power")
    body = []
    for pairs in (8, 16, 32, 64, 128, 256, 512):
        errors = errors_at_any_time(pairs) or math.inf
        widths = [factor / math.sqrt(pairs) for factor in (errors, student(pairs - 1), errors + _POWER)]
        body.append((str(pairs), *(f"{width:.2f}" for width in widths)))
    return table(header, body)


LARGE_SLOPE = 0.050
"""Slope of log loss over log compute of large language models (Kaplan et al. 2020, equation 1.3)."""
WORTH = ("model", "compute", "BF16's loss", "{arm}'s gap", "extra compute, ladder", "extra compute, large models")


class Rung(NamedTuple):
    """A dense size of the ladder under a condition."""

    model: str
    parameters: int
    tokens: int
    loss: float
    """BF16's mean loss, nats per token."""
    gaps: dict[str, Gap]
    """By recipe, without those that diverged in a block."""


def rungs(rows: Sequence[Row], condition: str) -> list[Rung]:
    """Return the dense sizes of equal tokens per parameter that have pairs, smaller models first."""
    found, by_model = [], sizes_by_model()
    for of_study in studies([row for row in rows if row["condition"] == condition]):
        model, tokens, _ = (of_study[0][key] for key in STUDY)
        own = by_model.get(model)
        if own is None or own.model.architecture != "llama" or tokens != under(condition, own).tokens:
            continue
        if own.tokens_per_parameter == SIZES["1m"].tokens_per_parameter:
            loss = fmean(row[decisive(of_study)] for row in of_study if row["recipe"] == BF16 and "error" not in row)
            own_gaps = {gap.arm: gap for gap in gaps(of_study) if gap.differences and not gap.failures}
            found.append(Rung(model, own.parameters, tokens, loss, own_gaps))
    return sorted(found, key=lambda rung: rung.parameters)


def worth_table(directory: Path, arm: str = "folded", condition: str = "half") -> str:
    """Return the extra compute that would close a recipe's gap, by dense size; empty without two sizes.

    Compute is 6 FLOPs per parameter and token (Kaplan et al. 2020, section 2.1). Sizes of equal tokens per parameter
    give the slope of the logarithm of BF16's loss over that of compute, between a size and its neighbours.
    """
    found = [rung for rung in rungs(read_rows(directory), condition) if arm in rung.gaps]
    if len(found) < 2:
        return ""
    computes, body = [6.0 * rung.parameters * rung.tokens for rung in found], []
    for at, (rung, compute) in enumerate(zip(found, computes, strict=True)):
        below, above, gap = max(0, at - 1), min(len(found) - 1, at + 1), rung.gaps[arm]
        slope = math.log(found[below].loss / found[above].loss) / math.log(computes[above] / computes[below])
        worths = [f"{100 * math.expm1(gap.mean / 100 / each):.1f} %" for each in (slope, LARGE_SLOPE)]
        body.append((rung.model, f"{compute:.1e} FLOP", f"{rung.loss:.4f}", interval(gap), *worths))
    return table([name.format(arm=arm) for name in WORTH], body)


FEWEST_SIZES, FEWEST_PAIRS = 4, 3
"""Minimum number of sizes per line, and of pairs per size."""
BEYOND = {"100 M": 1e8, "1 B": 1e9, "8 B": 8e9}
"""Parameters that the ladder is extrapolated to."""
TREND = ("condition", "recipe", "sizes", "pairs", "slope per 10x parameters", *(f"at {name}" for name in BEYOND))


def trend_table(directory: Path) -> str:
    """Return the ladder's gaps extrapolated by a line in the logarithm of parameters, with 95 % intervals.

    Each size counts once, by the mean of its pairs, whose error is part of the scatter about the line. The intervals
    are for a fixed n, and assume linearity beyond the data. Empty without a recipe of four sizes.
    """
    rows, body = read_rows(directory), []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        found = rungs(rows, condition)
        for arm in dict.fromkeys(arm for rung in found for arm in rung.gaps if arm not in (CONTROL, ALL)):
            own = [rung for rung in found if arm in rung.gaps and len(rung.gaps[arm].differences) >= FEWEST_PAIRS]
            if len(own) < FEWEST_SIZES:
                continue
            line = fit([math.log10(rung.parameters) for rung in own], [rung.gaps[arm].mean for rung in own])
            figures = [line.slope, *(line.at(math.log10(size)) for size in BEYOND.values())]
            pairs = ", ".join(str(len(rung.gaps[arm].differences)) for rung in own)
            sizes = f"{own[0].model} to {own[-1].model}"
            body.append((condition, arm, sizes, pairs, *(f"{f.mean:+.2f} % ± {f.half_width:.2f} %" for f in figures)))
    return table(TREND, body) if body else ""


def evidence(directory: Path) -> str:
    """Return the report on all pairs in the result files of a directory, with their origins; empty without pairs."""
    rows = read_rows(directory)
    origins = "\n\n".join(result.origin for result in _files(directory) if any(_is_current(row) for row in result.rows))
    return f"{report(rows)}\n\n{origins}" if rows else ""


def read_rows(*directories: Path, pilot: bool = False) -> list[Row]:
    """Return the runs in all result files of this kind, each once: those of this protocol, or those of its pilot."""
    runs: dict[tuple[Any, ...], Row] = {}
    for row in (row for directory in directories for result in _files(directory) for row in result.rows):
        if row.get("pilot", False) if pilot else _is_current(row):
            runs.setdefault(tuple(row[key] for key in RUN), row)
    return [*runs.values()]


def _is_current(row: Row) -> bool:
    return row["protocol"] in POOLED


def _files(directory: Path) -> list[Result]:
    return [load(path) for path in sorted(directory.glob(f"*-{NAME}.json"))]
