"""The generated tables of README and docs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from octavo_bench.cli.app import bench

ROOT = Path(__file__).parents[3]


@bench.command
def tables(*, check: Annotated[bool, Parameter(negative=())] = False, root: Path = ROOT) -> int:
    """Write the tables of README and docs from the result files and the code.

    Parameters
    ----------
    check
        Write nothing; exit with 1 if a page is not current.
    root
        The repository.
    """
    from octavo_bench.tables.pages import bring_up_to_date

    lines = bring_up_to_date(root, check=check)
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(check and bool(lines))
