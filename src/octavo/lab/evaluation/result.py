"""Scores of a model on a text: per sequence, as means with errors, and compared between precisions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from octavo import kernels
from octavo._util.terminal import Report, filled, quantity, reported
from octavo.lab.data.loader import Batch
from octavo.lab.evaluation.text import EvalText
from octavo.lab.guard.alarms import percent_above
from octavo.lab.monitor.gap import judge_gap
from octavo.lab.monitor.system import versions
from octavo.lab.train.evaluate import paired_interval, perplexity, standard_error

SERVED, INT8, FP8, BF16, HIGH = "served", "INT8", "FP8", "BF16", "high precision"
BASELINE, QUANTISED = "BF16 baseline", "BF16 quantised"
_COMPARED = (
    *((SERVED, INT8), (SERVED, FP8), (SERVED, BF16), (INT8, FP8), (INT8, HIGH), (FP8, HIGH)),
    *((INT8, BASELINE), (FP8, BASELINE), (INT8, QUANTISED), (FP8, QUANTISED)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Scores of a model in one precision, on a text of S sequences. Non-finite numbers are None."""

    computed: str
    """`FP8` and `high precision`, the same weights, and `INT8` if fprop multiplies it; `BF16 baseline`, and
    `BF16 quantised`, the same in eight bits by the run's recipe; `BF16` of a run without FP8; `served`."""
    losses_S: Tensor = field(compare=False, repr=False)
    """Nats per token; float64, on the CPU; not part of the JSON."""
    loss: float | None
    """Mean, nats per token."""
    loss_error: float | None
    """Standard error over sequences; None for a single sequence."""
    perplexity: float | None
    bits_per_byte: float | None
    """Loss per byte of text, independent of the tokenizer."""
    accuracy: float
    """Share of tokens predicted correctly."""
    fp8_gemms: dict[str, int]
    """GEMMs in eight bits run by Octavo, by kernel."""
    fallbacks: tuple[str, ...]
    """Reasons for slower kernels."""


Scoring = Callable[[Iterable[Batch]], Tensor]
"""Batches -> loss and accuracy per sequence, (S, 2)."""


def measure(computed: str, score: Scoring, text: EvalText, report: Report) -> Score:
    """Return the scores of a text."""
    with kernels.record() as ledger:
        losses_S, hits_S = score(reported(text, len(text), f"{computed}, batch", report)).unbind(1)
    mean, error = mean_and_error(losses_S)
    return Score(
        computed=computed,
        losses_S=losses_S,
        loss=mean,
        loss_error=error,
        perplexity=None if mean is None else _finite(perplexity(mean)),
        bits_per_byte=None if mean is None or not text.bytes else mean * text.tokens / text.bytes / math.log(2),
        accuracy=float(hits_S.mean()),
        fp8_gemms=dict(ledger.gemms),
        fallbacks=tuple(dict.fromkeys(ledger.fallbacks)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """Loss of `computed` minus that of `reference`, paired by sequence."""

    computed: str
    reference: str
    loss: float | None
    """Mean, nats per token."""
    loss_error: float | None
    """Standard error; far smaller than that of either loss, since both share the text."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation. `print(evaluation)` shows it as a table."""

    model: dict[str, Any]
    """Directory and properties of the model."""
    text: dict[str, Any]
    """Source, held out or not, tokens, bytes, sequences and their length."""
    device: str
    scores: tuple[Score, ...]
    differences: tuple[LossDifference, ...]
    notes: tuple[str, ...] = ()
    verdict: str = ""
    """What one run can tell about FP8 beside its BF16 baseline (`judge_gap`); empty without one."""
    versions: dict[str, str | None] = field(default_factory=versions)

    @property
    def is_finite(self) -> bool:
        """True if every loss is finite."""
        return all(score.loss is not None for score in self.scores)

    def to_json(self) -> str:
        """Return it as JSON."""
        found = asdict(self)
        for score in found["scores"]:
            del score["losses_S"]
        return json.dumps(found, indent=1, allow_nan=False)

    def __str__(self) -> str:
        told = ["", filled(self.verdict, 80)] if self.verdict else []
        return "\n".join([*_about(self), "", *_scores(self.scores), *_differences(self.differences), *told])


def evaluation(
    model: Mapping[str, Any],
    text: EvalText,
    device: str,
    found: Sequence[Score],
    notes: Sequence[str],
    noise: Mapping[str, Any] = MappingProxyType({}),
) -> Evaluation:
    """Return the evaluation of scores on a text; `noise` is what `judge_gap` takes of the noise between runs."""
    by_name = {one.computed: one for one in found}
    pairs = [(by_name[a], by_name[b]) for a, b in _COMPARED if a in by_name and b in by_name]
    return Evaluation(
        model=dict(model),
        text={
            "source": text.source,
            "heldout": text.is_heldout,
            "tokens": text.tokens,
            "bytes": text.bytes,
            "sequences": text.sequences,
            "sequence": text.layout.sequence,
        },
        device=device,
        scores=tuple(found),
        differences=tuple(_difference(one, other) for one, other in pairs),
        notes=tuple(notes),
        verdict=judge_gap({**noise, **gap}).text if (gap := _gap(by_name)) else "",
    )


def _gap(scores: Mapping[str, Score]) -> dict[str, float | None]:
    """Return the gap of FP8 to the BF16 baseline and its interval over sequences, percent; empty without a baseline."""
    if not {FP8, BASELINE} <= scores.keys():
        return {}
    fp8, bf16 = scores[FP8].losses_S, scores[BASELINE].losses_S
    reference = float(bf16.mean())
    gap = percent_above(float(fp8.mean()), reference)
    half_width = paired_interval(fp8.tolist(), bf16.tolist())[1]
    within = None if gap is None or half_width is None else 100 * half_width / reference
    return {"gap_percent": gap, "gap_95_percent": within}


def mean_and_error(values_S: Tensor) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None if missing or not finite."""
    return _finite(float(values_S.mean())), _finite(standard_error(values_S))


def _difference(one: Score, other: Score) -> LossDifference:
    mean, error = mean_and_error(one.losses_S - other.losses_S)
    return LossDifference(computed=one.computed, reference=other.computed, loss=mean, loss_error=error)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _about(found: Evaluation) -> Iterator[str]:
    facts = [f"{key} {value}" for key, value in found.model.items() if key != "directory" and value is not None]
    yield f"model       {found.model['directory']}"
    yield f"            {', '.join(facts)}"
    text = found.text
    yield f"text        {'held-out text of ' if text['heldout'] else ''}{text['source']}"
    layout = f"{quantity(text['sequences'], 'sequence')} of {text['sequence']:,}"
    yield f"            {text['tokens']:,} tokens in {layout}, {text['bytes']:,} bytes"
    yield f"device      {found.device}"
    in_fp8 = (sorted(score.fp8_gemms.items()) for score in found.scores if score.fp8_gemms)
    gemms = (f"8-bit GEMMs {', '.join(f'{count:,} {kernel}' for kernel, count in own)}" for own in in_fp8)
    fallbacks = (f"fallback    {reason}" for score in found.scores for reason in score.fallbacks)
    yield from dict.fromkeys((*gemms, *fallbacks))  # once, where several models compute alike
    yield from (f"note        {note}" for note in found.notes)


def _scores(scores: Sequence[Score]) -> Iterator[str]:
    yield f"{'':<16}{'loss':<18}{'perplexity':>12}{'bits per byte':>14}{'accuracy':>11}"
    for score in scores:
        loss = _with_error(score.loss, score.loss_error, ".4f")
        surprise = _number(score.perplexity, ",.3f" if (score.perplexity or 0) < 1e6 else ".3e")
        numbers = f"{surprise:>12}{_number(score.bits_per_byte, '.4f'):>14}{100 * score.accuracy:>9.2f} %"
        yield f"{score.computed:<16}{loss:<18}{numbers}"
    yield "\nLosses are in nats per token, ± their standard error over sequences."
    computed = {score.computed for score in scores}
    if {FP8, HIGH} <= computed:
        yield f"{HIGH}: the same weights without FP8."
    if {BASELINE, QUANTISED} <= computed:
        yield f"{QUANTISED}: the baseline's weights in the recipe of the run."


def _differences(differences: Sequence[LossDifference]) -> Iterator[str]:
    if not differences:
        return
    yield f"\n{'':<25}difference"
    for one in differences:
        pair = f"{one.computed} - {one.reference}"
        yield f"{pair:<25}{_with_error(one.loss, one.loss_error, '+.6f')}"
    yield "\nPaired by sequence, ± the standard error over this text, not over other runs."


def _with_error(value: float | None, error: float | None, form: str) -> str:
    return _number(value, form) if error is None else f"{_number(value, form)} ± {error:{form.lstrip('+')}}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"
