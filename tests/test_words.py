"""Plain technical English: words and phrases that the project has left behind do not come back.

Checked are docs, docstrings, help and messages: every text of the package, the benchmarks and the pages. The log and
the changelog name what was.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log")
SOURCES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]

DIALECT = {
    r"\banew\b": "again",
    r"\bdear\b|\bdearer\b": "expensive",
    r"\bwhat lies between\b": "the difference",
    r"\bat the price of\b": "at the cost of",
    r"\bquicker\b": "faster",
    r"\bsoon done\b": "short",
    r"\bwho knows\b": "unknown",
    r"\b(?:nats|bytes?|scales?|values?|bits?|launches|tokens|ms|milliseconds) an? (?:token|element|weight|parameter"
    r"|value|block|layer|step|tensor|operand|row|sequence|GPU|rank|program|second|byte)\b": "per",
    r"\b(?:once|twice) an? (?:step|layer|model|run|token|block|row|tile|epoch)\b": "per",
    r"\b(?:[Aa]|[Oo]ne|few) (?:book|columns?|contract|element|program|roll|row|run|scale|sequence|slot) an? (?:block"
    r"|element|figure|layer|model|operation|optimizer|parameter|program|rank|row|step|tensor|tier|tile)\b": "per",
    r"\bbe it\b": "whether",
    r"\bstand[- ]ins?\b": "placeholder",
    r"\bBF16 twin\b": "BF16 baseline",
    r"\bsums that shrink\b": "truncated accumulation",
    r"\bas ever\b": "as before",
    r"\bwhat is next to each other\b": "adjacent operations",
    r"\b(?:grow|grown) used to\b": "adapt to",
    r"\bfor want of\b": "for lack of",
    r"\bthe other way round\b": "transposed, or swapped",
    r"\bnow and then\b": "occasionally",
    r"\bwhat follows from (?:it|them)\b": "conclusions",
    r"\bso (?:it is|they are)\b(?=[.;,:]| for| in)": "confirmed, or a verb",
}
"""Pattern, and what to write in its place."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file with their lines: a page in full, of a module its strings."""
    if path.suffix == ".md":
        yield from enumerate(
            re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines(), 1
        )
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_word_of_the_old_dialect() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{match[0]}': write '{better}'"
        for path in (*PAGES, *SOURCES)
        for line, text in texts(path)
        for pattern, better in DIALECT.items()
        for match in re.finditer(pattern, text)
    ]
    assert len(SOURCES) > 300 and found == []


NOUNS = "layers|steps|tensors|elements|events|blocks|documents|sequences|GEMMs"
"""Counted in messages of the package. `3 of 4 layers`, texts of errors and what an `if` has told from one are left."""


def counts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that put a plural behind a number by themselves: with one they read `1 layers`."""
    skipped = (node for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.IfExp))
    left = {id(part) for node in skipped for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in left:
            continue
        for before, part, after in zip([None, *node.values], node.values, node.values[1:], strict=False):
            lead = before.value if isinstance(before, ast.Constant) else ""
            text = after.value if isinstance(after, ast.Constant) else ""
            behind = re.match(rf" (?:[a-z-]+ )?(?:{NOUNS})\b", str(text))
            is_known = str(lead).endswith(("of ", "every ", "last ", "than "))
            if isinstance(part, ast.FormattedValue) and behind and not is_known:
                yield f"line {node.lineno}: {ast.unparse(part)}{behind[0]}"


def test_a_count_agrees_with_its_noun() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES if "src" in path.parts}
    found = [f"{path.name}, {text}" for path, tree in trees.items() for text in counts(tree)]
    assert found == [], "write octavo._util.terminal.quantity(number, 'layer')"
