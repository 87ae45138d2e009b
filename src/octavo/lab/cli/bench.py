"""`octavo bench`: the commands of `benchmarks/octavo_bench`, which is in the repository and not in the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from octavo.errors import UnsupportedError

HELP = "Measure speed and accuracy, and write the result files that the tables are made from."
PACKAGE = "octavo_bench"
BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"
"""Its folder, when this file is in a clone."""
ELSEWHERE = (
    "The benchmarks are in Octavo's repository and not in the installed package: clone the repository, run "
    "`pip install -e .` in it, and octavo bench works."
)


def is_here() -> bool:
    """Return whether the benchmarks can be imported; those of the clone that this file is in are put on the path."""
    if importlib.util.find_spec(PACKAGE) is None and (BENCHMARKS / PACKAGE).is_dir():
        sys.path.append(str(BENCHMARKS))
        importlib.invalidate_caches()
    return importlib.util.find_spec(PACKAGE) is not None


def add_bench(app: App) -> None:
    """Add the command with its subcommands to an app; outside the repository, one that says where they are."""
    if is_here():
        app.command(f"{PACKAGE}.cli:bench", name="bench", help=HELP)
        return

    @app.command(name="bench", help=f"{HELP} {ELSEWHERE}", show=False)
    def elsewhere(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise UnsupportedError(ELSEWHERE)
