"""Export of a run to files that other programs read: Parquet, CSV, TensorBoard."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo._util.config_reader import blaming
from octavo.errors import ConfigError, StoreError, UnsupportedError, did_you_mean
from octavo.lab.monitor.store import RunReader, TensorRow
from octavo.lab.monitor.store.reader import RunEvent
from octavo.lab.monitor.trackers import aggregates

Batch = Mapping[str, Sequence[Any]]
"""Equally long columns by name."""
_BATCH = 64
"""Snapshots per batch."""


class ExportTable(NamedTuple):
    """A table to export."""

    columns: tuple[str, ...]
    batches: Callable[[], Iterator[Batch]]


def tables(run: RunReader) -> dict[str, ExportTable]:
    """Return the tables of a run, by name.

    - `scalars`: one row per step, one column per scalar; empty (NaN) without a value.
    - `telemetry`: one row per step, layer and role; one column per statistic.
    - `histograms`: one row per step, layer, role and exponent: `count` elements with 2^exponent <= |x| / scale <
      2^(exponent + 1).
    - `tensors`, `events`, `system`: as in the run store.
    """
    keys = run.keys()
    readings = run.system()
    measured = sorted({key for reading in readings for key in reading} - {"t"})
    labels = [(*row[:3], "x".join(map(str, row.shape))) for row in run.tensors]
    return {
        "scalars": ExportTable(("step", *keys), lambda: iter([_scalars(run, keys)])),
        "telemetry": ExportTable(("step", "layer", "role", *run.stats), lambda: _telemetry(run)),
        "histograms": ExportTable(("step", "layer", "role", "exponent", "count"), lambda: _histograms(run)),
        "tensors": ExportTable(TensorRow._fields, lambda: iter([_columns(labels, TensorRow._fields)])),
        "events": ExportTable(RunEvent._fields, lambda: iter([_columns(run.events(), RunEvent._fields)])),
        "system": ExportTable(
            ("t", *measured), lambda: iter([{key: [r.get(key) for r in readings] for key in ("t", *measured)}])
        ),
    }


def _columns(rows: Sequence[tuple[Any, ...]], fields: Sequence[str]) -> Batch:
    return {key: [row[place] for row in rows] for place, key in enumerate(fields)}


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
    for steps, values in run.snapshots(batch=_BATCH):
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


_TEXT = {"layer", "role", "operand", "shape", "level", "rule", "action", "text"}
_WHOLE = {"id", "step", "exponent", "count"}


def write_csv(run: RunReader, folder: Path) -> Iterator[Path]:
    """Write one `<table>.csv` per table; NaN and missing values are empty cells."""
    for name, table in tables(run).items():
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table.columns)
            for batch in table.batches():
                for row in zip(*(batch[key] for key in table.columns), strict=True):
                    writer.writerow("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row)
        yield path


def write_parquet(run: RunReader, folder: Path) -> Iterator[Path]:
    """Write one `<table>.parquet` per table, compressed with zstd.

    Raises:
        UnsupportedError: pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UnsupportedError('Parquet needs the package pyarrow: pip install "octavo[parquet]"') from error
    for name, table in tables(run).items():
        kinds = {key: _kind(arrow, key, name) for key in table.columns}
        schema = arrow.schema(list(kinds.items()))
        path = folder / f"{name}.parquet"
        with parquet.ParquetWriter(path, schema, compression="zstd") as file:
            for batch in table.batches():
                arrays = [arrow.array(batch[key], type=kind) for key, kind in kinds.items()]
                file.write_table(arrow.Table.from_arrays(arrays, schema=schema))
        yield path


def _kind(arrow: Any, key: str, table: str) -> Any:
    """Return the type of a column; layer and role, which repeat at every step, are dictionary-encoded."""
    if key in _TEXT:
        return arrow.dictionary(arrow.int32(), arrow.string()) if table == "telemetry" else arrow.string()
    if key in _WHOLE:
        return arrow.int64()
    return arrow.float32() if table == "telemetry" else arrow.float64()


def write_tensorboard(run: RunReader, folder: Path) -> Iterator[Path]:
    """Write an event file with the scalars and, as there is no series per tensor, the aggregates of the telemetry.

    TensorBoard becomes slow with thousands of series.

    Raises:
        UnsupportedError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError('event files need the package tensorboard: pip install "octavo[tensorboard]"') from error
    before = set(folder.iterdir())
    with SummaryWriter(str(folder), filename_suffix=".octavo") as writer:
        for step, wall, values in _steps(run):
            for tag, value in values.items():
                writer.add_scalar(tag, value, step, walltime=wall)
    yield from sorted(set(folder.iterdir()) - before)


def _steps(run: RunReader) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Yield (step, wall clock, values): the scalars first, then the aggregates."""
    by_step: dict[int, dict[str, float]] = {}
    for key, series in run.scalars().items():
        for step, value in zip(series.first.tolist(), series.low.tolist(), strict=True):
            by_step.setdefault(step, {})[key] = value
    start, times = run.sessions[0].started, {step: values.pop("time", 0.0) for step, values in by_step.items()}
    for step, values in sorted(by_step.items()):
        yield step, times[step] or start, values
    for steps, matrices in run.snapshots():
        for step, values_of_step in zip(steps.tolist(), matrices, strict=True):
            yield step, times.get(step) or start, aggregates(values_of_step, run.stats)


FORMATS: dict[str, Callable[[RunReader, Path], Iterator[Path]]] = {
    "parquet": write_parquet,
    "csv": write_csv,
    "tensorboard": write_tensorboard,
}
"""Functions that write a run into a folder and yield the files. To add a format, add a line."""


def export(run: str | Path, to: str, folder: str | Path) -> list[Path]:
    """Write a run as files of another format and return their paths. The run may still be training.

    Raises:
        ConfigError: an unknown format.
        StoreError: there is no run, or `folder` cannot be written.
        UnsupportedError: the format needs a package that is not installed.
    """
    if to not in FORMATS:
        raise ConfigError(f"unknown format '{to}'.{did_you_mean(to, FORMATS)} Known: {', '.join(FORMATS)}.")
    folder = Path(folder)
    with RunReader(run) as reader:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with blaming(reader.path, StoreError):
                return list(FORMATS[to](reader, folder))
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written ({error.strerror}).") from error
