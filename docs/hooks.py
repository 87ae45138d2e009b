"""Hooks of the site: pages from outside docs/ are added, markers of tables are dropped, and figures get an age."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # not in the installed package

from octavo_bench.ages import has_history, with_ages  # noqa: E402

OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
OUTSIDE |= {"SECURITY.md": "security.md", "CODE_OF_CONDUCT.md": "conduct.md"}
OUTSIDE["benchmarks/README.md"] = "benchmarks.md"
"""File of the repository, and its page."""
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>')
LINK = re.compile(r'(\]\(|src="|srcset=")(?!https?:|#)([^)#"]+)')


def on_pre_build(config: Any) -> None:
    """Say that no figure will have an age; not as a warning, which would end a strict build of an archive."""
    if not has_history():
        print("site: no clone with its whole history: tables do not say how old their figures are", file=sys.stderr)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_relinked(_themed(text), ROOT / name, page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the pages that were added, and say how old measured figures are."""
    name = page.file.src_uri
    text = markdown if name in OUTSIDE.values() else _relinked(markdown, ROOT / "docs" / name, name)
    text = with_ages(text)
    return re.sub(r"^<!-- (table: \S+|end|not run: .*) -->\n", "", text, flags=re.MULTILINE)


def _themed(text: str) -> str:
    """Let pictures in two themes follow the site's switch, not the system's."""
    return PICTURE.sub(r'<img alt="\2" src="\3#only-light"><img alt="\2" src="\1#only-dark">', text)


def _relinked(text: str, source: Path, page: str) -> str:
    up = "../" * page.count("/")

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        inside = target.relative_to(ROOT).as_posix()
        if inside.startswith("docs/"):
            return match[1] + up + inside.removeprefix("docs/")
        return match[1] + up + OUTSIDE.get(inside, "index.md")  # code and licence: no page of their own

    return LINK.sub(link, text)
