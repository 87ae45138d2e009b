"""The result of an evaluation: a row for each way of computing a model, and what two ways differ by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from octavo.evaluation.measure import Measured
from octavo.evaluation.text import Text
from octavo.monitor.system import versions
from octavo.train.evaluate import perplexity, standard_error

SERVED, FP8, BF16, HIGH, TWIN = "served", "FP8", "BF16", "high precision", "BF16 twin"
_COMPARED = (SERVED, FP8), (SERVED, BF16), (FP8, HIGH), (FP8, TWIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A model on a text. Numbers that are not finite are None."""

    computed: str
    """`FP8` and `high precision`, the same weights; `BF16 twin`; `BF16` of a run without FP8; `served`."""
    loss: float | None
    """Mean, nats a token."""
    loss_error: float | None
    """Its standard error over sequences; None for one sequence alone."""
    perplexity: float | None
    bits_per_byte: float | None
    """The loss by bytes of text, which tokenizers do not change."""
    accuracy: float
    """Share of the tokens that were thought the likeliest."""
    fp8_gemms: dict[str, int]
    """Products in FP8 that Octavo ran, by kernel."""
    fallbacks: tuple[str, ...]
    """Why slower kernels ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The loss of `computed` less that of `reference`, sequence by sequence."""

    computed: str
    reference: str
    loss: float | None
    """Mean, nats a token."""
    loss_error: float | None
    """Its standard error: far smaller than that of either, which have the text in common."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was evaluated, on what, and what came out. `print(evaluation)` shows it as a table."""

    model: dict[str, Any]
    """Directory, and what is known of how it was trained or written."""
    text: dict[str, Any]
    """Source, whether it was held out, tokens, bytes, sequences and their length."""
    device: str
    scores: tuple[Score, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=versions)

    @property
    def is_finite(self) -> bool:
        """Whether every loss is a number."""
        return all(score.loss is not None for score in self.scores)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join([*_about(self), "", *_scores(self.scores), *_differences(self.differences)])


def evaluation(
    model: Mapping[str, Any], text: Text, device: str, found: Sequence[Measured], notes: Sequence[str]
) -> Evaluation:
    """Return the result of what was measured on a text."""
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
            "sequence": text.cut.sequence,
        },
        device=device,
        scores=tuple(_score(one, text) for one in found),
        differences=tuple(_difference(one, other) for one, other in pairs),
        notes=tuple(notes),
    )


def mean_and_error(values_S: Tensor) -> tuple[float | None, float | None]:
    """Return the mean and its standard error, None where there is none or it is not finite."""
    error = _finite(standard_error(values_S)) if len(values_S) > 1 else None
    return _finite(float(values_S.mean())), error


def _score(one: Measured, text: Text) -> Score:
    mean, error = mean_and_error(one.losses_S)
    return Score(
        computed=one.computed,
        loss=mean,
        loss_error=error,
        perplexity=None if mean is None else _finite(perplexity(mean)),
        bits_per_byte=None if mean is None or not text.bytes else mean * text.tokens / text.bytes / math.log(2),
        accuracy=float(one.hits_S.mean()),
        fp8_gemms=one.fp8_gemms,
        fallbacks=one.fallbacks,
    )


def _difference(one: Measured, other: Measured) -> Difference:
    mean, error = mean_and_error(one.losses_S - other.losses_S)
    return Difference(computed=one.computed, reference=other.computed, loss=mean, loss_error=error)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _about(found: Evaluation) -> Iterator[str]:
    facts = [f"{key} {value}" for key, value in found.model.items() if key != "directory" and value is not None]
    yield f"model       {found.model['directory']}"
    yield f"            {', '.join(facts)}"
    text = found.text
    yield f"text        {'held-out text of ' if text['heldout'] else ''}{text['source']}"
    cut = f"{text['sequences']:,} sequences of {text['sequence']:,}"
    yield f"            {text['tokens']:,} tokens in {cut}, {text['bytes']:,} bytes"
    yield f"device      {found.device}"
    for gemms in (score.fp8_gemms for score in found.scores if score.fp8_gemms):
        yield f"FP8 GEMMs   {', '.join(f'{count:,} {kernel}' for kernel, count in sorted(gemms.items()))}"
    yield from (f"fallback    {reason}" for score in found.scores for reason in score.fallbacks)
    yield from (f"note        {note}" for note in found.notes)


def _scores(scores: Sequence[Score]) -> Iterator[str]:
    yield f"{'':<16}{'loss':<18}{'perplexity':>12}{'bits a byte':>14}{'accuracy':>11}"
    for score in scores:
        loss = _with_error(score.loss, score.loss_error, ".4f")
        surprise = _number(score.perplexity, ",.3f" if (score.perplexity or 0) < 1e6 else ".3e")
        numbers = f"{surprise:>12}{_number(score.bits_per_byte, '.4f'):>14}{100 * score.accuracy:>9.2f} %"
        yield f"{score.computed:<16}{loss:<18}{numbers}"
    yield "\nLosses are in nats a token, ± their standard error over sequences."


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    if not differences:
        return
    yield f"\n{'':<25}difference"
    for one in differences:
        pair = f"{one.computed} - {one.reference}"
        yield f"{pair:<25}{_with_error(one.loss, one.loss_error, '+.6f')}"
    yield "\nPaired by sequence. Within two standard errors, a difference may be chance."


def _with_error(value: float | None, error: float | None, form: str) -> str:
    return _number(value, form) if error is None else f"{_number(value, form)} ± {error:{form.lstrip('+')}}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"
