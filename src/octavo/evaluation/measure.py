"""What each sequence of a text costs a model, and which kernels ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from octavo import kernels
from octavo.data.loader import Batch
from octavo.evaluation.text import Text

Watch = Callable[[str, Text], Iterable[Batch]]
"""Called with how the next model is computed and the text; returns its batches, and may count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A model, computed in one way, on a text of S sequences."""

    computed: str
    """In which way."""
    losses_S: Tensor
    """Nats a token; float64, on the CPU, as are the shares."""
    hits_S: Tensor
    """Share of the targets that were the likeliest token."""
    fp8_gemms: dict[str, int]
    """By kernel."""
    fallbacks: tuple[str, ...]
    """Why slower kernels ran."""


def unwatched(computed: str, text: Text) -> Iterable[Batch]:
    """Return the batches of a text, and tell nobody."""
    return text


def measure(computed: str, score: Callable[[Iterable[Batch]], Tensor], text: Text, watch: Watch) -> Measured:
    """Return what `score` makes of the text: a row for each sequence, its loss and the share of its targets."""
    with kernels.record() as ledger:
        losses_S, hits_S = score(watch(computed, text)).unbind(1)
    gemms, fallbacks = dict(ledger.gemms), tuple(dict.fromkeys(ledger.fallbacks))
    return Measured(computed=computed, losses_S=losses_S, hits_S=hits_S, fp8_gemms=gemms, fallbacks=fallbacks)
