"""Ages of results: how many commits have changed the code that a result file measures since it was measured.

`octavo bench ages` prints them, and the site says them below each table. They are not part of the committed pages: a
page would change with every commit, and an archive without history could not check it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from octavo._util.terminal import quantity
from octavo_bench.render import table

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
FILE = re.compile(r"`(\d{4}-\d{2}-\d{2}-[a-z0-9.-]+\.json)`")
KERNELS = ("src/octavo/kernels", "src/octavo/nn")
MEASURED: Mapping[str, tuple[str, ...]] = {
    "gemm": ("src/octavo/kernels",),
    "kernels": ("src/octavo/kernels",),
    "optimizer": ("src/octavo/optim", "src/octavo/kernels"),
    "distributed": (*KERNELS, "src/octavo/distributed"),
    "memory": (*KERNELS, "src/octavo/lab/memory", "src/octavo/optim"),
    "faults": ("src/octavo/lab/guard",),
    "downstream": (*KERNELS, "src/octavo/lab/train", "src/octavo/lab/evaluation"),
    "clients": (*KERNELS, "src/octavo/integrations"),
    "scaling": ("benchmarks/octavo_bench/scaling.py",),
    "robustness": ("src/octavo",),
}
"""Kind -> paths whose code its figures depend on; those of other open kinds depend on `KERNELS`."""


class Age(NamedTuple):
    """The changes of measured code since the figures of a result file were committed."""

    file: str
    commits: int
    paths: tuple[str, ...]

    def __str__(self) -> str:
        """Return a sentence: empty if nothing changed."""
        if not self.commits:
            return ""
        paths = ", ".join(f"`{path}`" for path in self.paths)
        return f"Measured before {quantity(self.commits, 'commit')} to {paths}: today's figures may differ."


def paths_of(file: str) -> tuple[str, ...]:
    """Return the paths that a result file measures, from the kind in its name."""
    kinds = sorted(MEASURED, key=len, reverse=True)
    return next((MEASURED[kind] for kind in kinds if re.search(rf"-{kind}(?:-[a-z0-9]+)?\.json$", file)), KERNELS)


@cache
def age(file: str, root: Path = ROOT) -> Age | None:
    """Return the age of a result file; None without the whole history, and for a file that is not committed."""
    log = _git(root, "log", "--format=%H %as", "--", f"{RESULTS}/{file}") if has_history(root) else None
    if not log:
        return None
    commits = [line.split() for line in log.splitlines()]  # the newest first
    # A commit of a later day renames a field or counts anew; the figures are as old as the name says.
    added = next((commit for commit, day in commits if day <= file[:10]), commits[-1][0])
    paths = paths_of(file)
    count = _git(root, "rev-list", "--count", f"{added}..HEAD", "--", *paths)
    return None if count is None else Age(file, int(count), paths)


@cache
def has_history(root: Path = ROOT) -> bool:
    """Return whether `root` is a clone, or a worktree of one, with all commits; a shallow one would count too few."""
    inside = (root / ".git").exists()  # and not an archive that lies in another repository
    return inside and _git(root, "rev-parse", "--is-shallow-repository") == "false"


def _git(root: Path, *arguments: str) -> str | None:
    """Return what Git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def with_ages(markdown: str, root: Path = ROOT) -> str:
    """Return a page with the age behind each line that says where figures come from."""
    return "\n".join(_with_age(line, root) for line in markdown.split("\n"))


def _with_age(line: str, root: Path) -> str:
    named = FILE.search(line) if re.match(r"(Measured|Computed, not measured)\b", line) else None
    known = named and age(named[1], root)
    return f"{line} *{known}*" if known and str(known) else line


def ages(root: Path = ROOT) -> Iterator[Age]:
    """Yield the ages of all result files, the most changed first."""
    every = (age(path.name, root) for path in (root / RESULTS).glob("*.json"))
    yield from sorted((known for known in every if known), key=lambda known: (-known.commits, known.file))


def command(*, root: Annotated[Path, Parameter(negative=())] = ROOT) -> int:
    """Print how many commits have changed the measured code since the figures of each result file were committed.

    Parameters
    ----------
    root
        The repository.
    """
    rows = [(f"`{each.file}`", str(each.commits), ", ".join(each.paths)) for each in ages(root)]
    if not rows:
        print(
            f"{root}: not a clone with its whole history, so ages are unknown. In a shallow one: git fetch --unshallow."
        )
        return 1
    print(table(("result", "commits since", "to"), rows))
    return 0
