"""Drift of batches away from the whole text, and held-out losses by source."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from torch import Tensor

from octavo.lab.data.loader import IDS, open_tokens

SAMPLE = 1 << 22
"""Ids of the text that batches are compared with, evenly spread."""
PAST, LEAST = 46, 8
"""Batches of history, and how many are needed."""
DRIFT, LEAST_DRIFT = 8.0, 0.25
"""Standard errors and share by which the divergence of recent batches exceeds the history's mean when it drifts."""
RECENT = 4
"""Batches that drift together. The farthest is left out: in small batches one table of digits is as far as a drift."""
RISE = 0.05
"""Share by which the held-out loss of a source exceeds its minimum when it rises alone."""


class BatchDrift:
    """Statistics of batches, and a rule for a change in the distribution of their ids."""

    def __init__(self, train: Path, vocab: int, end_of_document: int) -> None:
        """Read the distribution of ids in a token file."""
        tokens = open_tokens(train)
        sample = tokens[:: max(1, len(tokens) // SAMPLE)] & tokens.dtype.type(IDS & np.iinfo(tokens.dtype).max)
        counts = np.bincount(sample, minlength=vocab) + 1.0  # one more: unseen ids cost a finite amount
        self._log_shares = np.log(counts / counts.sum())
        self._end = end_of_document
        self._past: deque[float] = deque(maxlen=PAST)

    def measure(self, inputs_BT: Tensor) -> dict[str, float]:
        """Return the statistics of a batch.

        `batch_divergence`: Kullback-Leibler divergence of its ids from the text's, nats per id.
        `batch_document_tokens`: ids per end of document, at most the batch.
        """
        ids = inputs_BT.numpy().ravel()
        ids = np.where(ids < 0, ~ids, ids)  # the first of a packed document
        counts = np.bincount(ids, minlength=len(self._log_shares))
        there = counts > 0
        shares = counts[there] / len(ids)
        divergence = float((shares * (np.log(shares) - self._log_shares[there])).sum())
        ends = int(counts[self._end])
        return {"batch_divergence": divergence, "batch_document_tokens": len(ids) / max(ends, 1)}

    def drifts(self, divergence: float) -> tuple[float, float] | None:
        """Add the divergence of a batch; return the mean of the newest and its limit if they drift.

        The new level is then adopted.
        """
        self._past.append(divergence)
        before, recent = [*self._past][:-RECENT], [*self._past][-RECENT:]
        if len(before) < LEAST:
            return None
        mean = fmean(before)
        limit = mean + max(DRIFT * stdev(before) * math.sqrt(1 / RECENT + 1 / len(before)), LEAST_DRIFT * mean)
        seen = fmean(sorted(recent)[:-1])
        if seen <= limit:
            return None
        self._past.clear()
        return seen, limit


class SourceLosses:
    """Held-out loss by source of the text, and a rule for a source whose loss rises while the whole improves."""

    def __init__(self, sources: Sequence[tuple[str, int]], sequence: int) -> None:
        """Take the first held-out token of each source, in order, and the tokens per sequence."""
        self._names = list(dict.fromkeys(name for name, _ in sources))
        self._starts = np.array([start for _, start in sources])
        self._source = np.array([self._names.index(name) for name, _ in sources])
        self._sequence = sequence
        self._best: dict[str, float] = {}

    def by_source(self, losses_S: Tensor) -> dict[str, float]:
        """Return the mean loss of the sequences that begin in each source; empty with less than two."""
        if len(self._names) < 2:
            return {}
        begins = np.searchsorted(self._starts, np.arange(len(losses_S)) * self._sequence, side="right") - 1
        values, source = losses_S.numpy(), self._source[begins]
        return {
            name: float(values[source == number].mean())
            for number, name in enumerate(self._names)
            if (source == number).any()
        }

    def rises(self, whole: float, losses: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
        """Yield each source whose loss exceeds its minimum although the whole's does not, with loss and limit."""
        limits = {name: (1 + RISE) * best for name, best in self._best.items()}
        seen = {"": whole, **losses}
        self._best = {name: min(value, self._best.get(name, value)) for name, value in seen.items()}
        if whole <= limits.get("", math.inf):
            yield from ((name, x, limits[name]) for name, x in losses.items() if x > limits.get(name, math.inf))
