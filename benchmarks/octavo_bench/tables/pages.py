"""Pages of the docs, and the tables that stand between two lines of them."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ConfigError
from octavo_bench.tables.named import render

MARK = re.compile(r"^<!-- (?:table: (?P<name>\S+)|(?P<end>end)) -->$")


def fill(text: str, directory: Path, where: str) -> str:
    """Return the page `text` with every table between markers written again; `where` names it in errors.

    Raises:
        ConfigError: a table that does not end, an end without a table, or an unknown table.
    """
    lines: list[str] = []
    open_table: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.match(line)
        if mark is None:
            lines += [] if open_table else [line]
            continue
        if bool(mark["end"]) != bool(open_table):
            problem = f"'{open_table}' has no end before this line" if open_table else "ends a table that never began"
            raise ConfigError(f"{where}:{number}: {line}: {problem}.")
        lines.append(f"{render(open_table, directory)}\n{line}" if open_table else line)
        open_table = mark["name"]
    if open_table:
        raise ConfigError(f"{where}: the table '{open_table}' has no `<!-- end -->`.")
    return "\n".join(lines) + "\n"


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the repository at `root` that may hold tables."""
    named = [root / "README.md", root / "benchmarks" / "README.md"]
    return [page for page in (*named, *sorted((root / "docs").rglob("*.md"))) if page.is_file()]


def outdated(root: Path) -> dict[Path, str]:
    """Return the pages whose tables are not current, each with the text it should have."""
    directory = root / "benchmarks" / "results"
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    current = {page: fill(text, directory, str(page.relative_to(root))) for page, text in texts.items()}
    return {page: text for page, text in current.items() if text != texts[page]}


def bring_up_to_date(root: Path, *, check: bool) -> list[str]:
    """Write the pages whose tables are not current, or only check them; return a line on each."""
    stale = outdated(root)
    for page, text in stale.items():
        if not check:
            page.write_text(text, encoding="utf-8")
    return [f"{page}: {'not current; run octavo bench tables' if check else 'written'}" for page in stale]
