"""The tables that a run is exported as, in batches of rows: whatever the format, the same columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from octavo.monitor.store import RunReader

Batch = Mapping[str, Sequence[Any]]
"""Column -> values, all of one length."""
_AT_ONCE = 64
"""Snapshots in a batch."""


class Exported(NamedTuple):
    """A table to be."""

    columns: tuple[str, ...]
    batches: Callable[[], Iterator[Batch]]


def tables(run: RunReader) -> dict[str, Exported]:
    """Return what a run is exported as, by name.

    - `scalars`: a row a step, a column a scalar; empty (NaN) where there is none.
    - `telemetry`: a row a step, layer and role; a column a statistic.
    - `histograms`: a row a step, layer, role and exponent: `count` elements from 2^exponent to twice that, over scales.
    - `tensors`, `events`, `system`: as in the run store.
    """
    keys = run.keys()
    readings = run.system()
    measured = sorted({key for reading in readings for key in reading} - {"t"})
    events = run.events()
    fields = ("id", "step", "t", "level", "rule", "layer", "role", "value", "limit", "action", "text")
    return {
        "scalars": Exported(("step", *keys), lambda: iter([_scalars(run, keys)])),
        "telemetry": Exported(("step", "layer", "role", *run.stats), lambda: _telemetry(run)),
        "histograms": Exported(("step", "layer", "role", "exponent", "count"), lambda: _histograms(run)),
        "tensors": Exported(("layer", "role", "operand", "shape"), lambda: iter([_tensors(run)])),
        "events": Exported(fields, lambda: iter([{key: [getattr(e, key) for e in events] for key in fields}])),
        "system": Exported(
            ("t", *measured), lambda: iter([{key: [r.get(key) for r in readings] for key in ("t", *measured)}])
        ),
    }


def _scalars(run: RunReader, keys: Sequence[str]) -> Batch:
    series = run.scalars()
    steps = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(found.first for found in series.values())]))
    columns: dict[str, Sequence[Any]] = {"step": steps.tolist()}
    for key in keys:
        column = np.full(len(steps), np.nan)
        if key in series:
            column[np.searchsorted(steps, series[key].first)] = series[key].low
        columns[key] = column.tolist()
    return columns


def _telemetry(run: RunReader) -> Iterator[Batch]:
    tensors = run.tensors
    layers, roles = [row.layer for row in tensors], [row.role for row in tensors]
    for steps, values in run.snapshots(at_once=_AT_ONCE):
        flat = values.reshape(-1, len(run.stats))
        names = {"layer": layers * len(steps), "role": roles * len(steps)}
        columns = {stat: flat[:, column].tolist() for column, stat in enumerate(run.stats)}
        yield {"step": np.repeat(steps, len(tensors)).tolist(), **names, **columns}


def _histograms(run: RunReader) -> Iterator[Batch]:
    tensors = run.tensors
    for step, index, low, counts in run.histograms():
        row, bins = tensors[index], len(counts)
        yield {
            "step": [step] * bins,
            "layer": [row.layer] * bins,
            "role": [row.role] * bins,
            "exponent": range(low, low + bins),
            "count": counts.tolist(),
        }


def _tensors(run: RunReader) -> Batch:
    rows = run.tensors
    return {
        "layer": [row.layer for row in rows],
        "role": [row.role for row in rows],
        "operand": [row.operand for row in rows],
        "shape": ["x".join(map(str, row.shape)) for row in rows],
    }
