"""Generated tables of README and docs: no figure is typed.

A page has a table between two lines, and only the text between them is written:

    <!-- table: step -->
    <!-- end -->

`octavo bench tables` writes every page; with `--check` it names the pages that are not current and exits with 1. Tables
of measurements are defined by one kind, or show several (`readme`); tables of facts come from the code
(`facts`); those of closed studies are only checked (`closed`).
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from octavo.errors import ConfigError, did_you_mean
from octavo_bench import closed, facts, readme
from octavo_bench.kind import kinds
from octavo_bench.render import Table

STUDIES = Path("src/octavo/lab/train/presets/studies.json")
"""What the package has of the parity study, which the verdict of a run quotes."""
MARK = re.compile(r"^<!-- (?:(?:table:|closed: (?P<digest>\w+)) (?P<name>\S+)|(?P<end>end)) -->$")


def fill(text: str, directory: Path, where: str) -> str:
    """Return the page `text` with every table between markers rewritten; `where` names it in errors.

    Raises:
        ConfigError: a table without an end, an end without a table, an unknown table, or a closed one that changed.
    """
    lines: list[str] = []
    body: list[str] = []
    begun: re.Match[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.match(line)
        if mark is None:
            (body if begun else lines).append(line)
            continue
        if bool(mark["end"]) != bool(begun):
            problem = f"'{begun['name']}' has no end before this line" if begun else "ends a table that never began"
            raise ConfigError(f"{where}:{number}: {line}: {problem}.")
        if begun:
            lines.append(_content(begun, "\n".join(body), directory, where))
        lines.append(line)
        begun, body = None if begun else mark, []
    if begun:
        raise ConfigError(f"{where}: the table '{begun['name']}' has no `<!-- end -->`.")
    return "\n".join(lines) + "\n"


def _content(mark: re.Match[str], text: str, directory: Path, where: str) -> str:
    """Return what belongs between two marks; `text` is there now."""
    if mark["digest"]:
        return closed.check(mark["name"], text, mark["digest"], where)
    return render(mark["name"], directory)


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the repository at `root` that may hold tables."""
    named = [root / "README.md", root / "benchmarks" / "README.md"]
    return [page for page in (*named, *sorted((root / "docs").rglob("*.md"))) if page.is_file()]


def outdated(root: Path) -> dict[Path, str]:
    """Return the pages whose tables are not current, each with the text it should have."""
    directory = root / "benchmarks" / "results"
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    current = {page: fill(text, directory, str(page.relative_to(root))) for page, text in texts.items()}
    if (packaged := root / STUDIES).is_file():
        texts[packaged] = packaged.read_text(encoding="utf-8")
        current[packaged] = json.dumps(readme.studies(directory), indent=1) + "\n"
    return {page: text for page, text in current.items() if text != texts[page]}


def bring_up_to_date(root: Path, *, check: bool) -> list[str]:
    """Write the pages whose tables are not current, or only check them; return a line per page."""
    stale = outdated(root)
    for page, text in stale.items():
        if not check:
            page.write_text(text, encoding="utf-8")
    return [f"{page}: {'not current; run octavo bench tables' if check else 'written'}" for page in stale]


NOT_MEASURED = "*Not measured yet.*"

ROOT = Path(__file__).parents[2]


@cache
def tables() -> dict[str, Table]:
    """Return the tables of measurements by name; those of facts are `facts.TABLES`."""
    found: dict[str, Table] = {name: kind.table for name, kind in kinds().items()}
    for kind in kinds().values():
        found |= kind.tables
    return found | {**readme.TABLES}


def render(name: str, directory: Path) -> str:
    """Return the table called `name`; measured ones come from the results under `directory`.

    Raises:
        ConfigError: there is no such table, or a result file is invalid.
    """
    if name in facts.TABLES:
        return facts.TABLES[name]()
    if name not in tables():
        known = (*tables(), *facts.TABLES)
        raise ConfigError(f"unknown table '{name}'.{did_you_mean(name, known)} Tables: {', '.join(known)}.")
    return tables()[name](directory) or NOT_MEASURED


def command(*, check: Annotated[bool, Parameter(negative=())] = False, root: Path = ROOT) -> int:
    """Write the tables of README and docs from the result files and the code.

    Parameters
    ----------
    check
        Write nothing; exit with 1 if a page is not current.
    root
        The repository.
    """
    lines = bring_up_to_date(root, check=check)
    print(*lines, sep="\n", end="\n" if lines else "")
    return int(check and bool(lines))
