"""CSV, and Parquet by the package pyarrow: a file a table."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import UnsupportedError
from octavo.monitor.export.tables import Exported, tables
from octavo.monitor.store import RunReader

_TEXT = {"layer", "role", "operand", "shape", "level", "rule", "action", "text"}
_WHOLE = {"id", "step", "exponent", "count"}


def write_csv(run: RunReader, folder: Path) -> list[Path]:
    """Write `<table>.csv` for each table; NaN and what is not there are empty cells."""
    written = []
    for name, table in tables(run).items():
        path = folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table.columns)
            for row in _rows(table):
                writer.writerow("" if isinstance(cell, float) and math.isnan(cell) else cell for cell in row)
        written.append(path)
    return written


def write_parquet(run: RunReader, folder: Path) -> list[Path]:
    """Write `<table>.parquet` for each table, compressed with zstd.

    Raises:
        UnsupportedError: pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UnsupportedError("Parquet needs the package pyarrow: pip install octavo[parquet]") from error
    written = []
    for name, table in tables(run).items():
        kinds = {key: _kind(arrow, key, name) for key in table.columns}
        schema = arrow.schema(list(kinds.items()))
        path = folder / f"{name}.parquet"
        with parquet.ParquetWriter(path, schema, compression="zstd") as file:
            for batch in table.batches():
                arrays = [arrow.array(batch[key], type=kind) for key, kind in kinds.items()]
                file.write_table(arrow.Table.from_arrays(arrays, schema=schema))
        written.append(path)
    return written


def _kind(arrow: Any, key: str, table: str) -> Any:
    """Return the type of a column; layer and role repeat at every step, so they are kept once and pointed to."""
    if key in _TEXT:
        return arrow.dictionary(arrow.int32(), arrow.string()) if table == "telemetry" else arrow.string()
    if key in _WHOLE:
        return arrow.int64()
    return arrow.float32() if table == "telemetry" else arrow.float64()


def _rows(table: Exported) -> Iterator[tuple[Any, ...]]:
    for batch in table.batches():
        yield from zip(*(batch[key] for key in table.columns), strict=True)
