"""`octavo dump`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def dump(
    run: Path,
    /,
    *,
    to: Literal["parquet", "csv", "tensorboard"],
    out: Path | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Write the numbers of a run as Parquet, CSV or TensorBoard files. It may still be training.

    Examples:

        octavo dump runs/demo --to parquet
        octavo dump runs/demo --to csv --out tables
        octavo dump runs/demo --to tensorboard --out logs/demo

    Parameters
    ----------
    run
        The directory of a run, or its run.sqlite.
    to
        parquet or csv: a file a table, scalars, telemetry, tensors, events and system. tensorboard: an event file with
        the scalars and aggregates of the telemetry.
    out
        Folder to write to; by default a folder with the name of the format in that of the run.
    json_output
        Print the paths as JSON.
    """
    from octavo.monitor.export import export
    from octavo.monitor.store.writer import file_of

    folder = out or file_of(run).parent / to
    written = export(run, to, folder)
    if json_output:
        print(json.dumps({"files": [str(path) for path in written]}, indent=2))
    else:
        print("\n".join(str(path) for path in written))
    return 0
