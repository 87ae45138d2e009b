"""`octavo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(
    *runs: Path,
    output: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
) -> int:
    """Write the dashboard of a run, or of several side by side, as one HTML file to keep or to send.

    The file holds everything, opens from disk, and asks no network for anything.

    Examples:

        octavo report runs/demo
        octavo report runs/demo runs/other -o compared.html

    Parameters
    ----------
    runs
        Directories of runs.
    output
        File to write.
    """
    from octavo.monitor.dashboard.report import report as write
    from octavo.errors import ConfigError

    if not runs:
        raise ConfigError("no run is named: name one, as in `octavo report runs/demo`.")
    path = write(runs, output)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0
