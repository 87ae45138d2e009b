"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.errors import ConfigError, StoreError, did_you_mean
from octavo.monitor.export.tabular import write_csv, write_parquet
from octavo.monitor.export.tensorboard import write_tensorboard
from octavo.monitor.store import RunReader

FORMATS: dict[str, Callable[[RunReader, Path], list[Path]]] = {
    "parquet": write_parquet,
    "csv": write_csv,
    "tensorboard": write_tensorboard,
}
"""By name: what writes a run into a folder and returns the files. A new one is a line here."""


def export(run: str | Path | RunReader, to: str, folder: str | Path) -> list[Path]:
    """Write a run as files of another format, and return their paths. The run may still be in progress.

    Raises:
        ConfigError: there is no such format.
        StoreError: there is no run, or `folder` cannot be written.
        UnsupportedError: the format needs a package that is not installed.
    """
    if to not in FORMATS:
        raise ConfigError(f"there is no format '{to}'.{did_you_mean(to, FORMATS)} Formats: {', '.join(FORMATS)}.")
    folder = Path(folder)
    reader = run if isinstance(run, RunReader) else RunReader(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FORMATS[to](reader, folder)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror}).") from error
    finally:
        if reader is not run:
            reader.close()
