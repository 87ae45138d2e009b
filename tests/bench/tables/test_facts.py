from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from octavo import errors, recipes
from octavo.conversion import Operators
from octavo_bench import facts
from octavo_bench.closed import STUDIES


@dataclass(frozen=True)
class Inner:
    depth: int = 3
    """How
    deep."""
    bare: str = "x"


@dataclass(frozen=True)
class Outer:
    name: str
    """What it is called."""
    inner: Inner = field(default_factory=Inner)
    """Left out: its own fields are listed."""
    either: int | None = None
    """A union."""


def test_fields_come_with_type_default_and_docstring() -> None:
    lines = facts.field_table(Outer).splitlines()[2:]
    assert lines == [
        "| `name` | `str` | required | What it is called. |",
        "| `inner.depth` | `int` | `3` | How deep. |",
        "| `inner.bare` | `str` | `x` |  |",
        "| `either` | `int \\| None` | `None` | A union. |",
    ]


def test_every_recipe_has_a_line() -> None:
    for name in recipes.names():
        assert f"| `{name}` |" in facts.recipe_table() and f"| `{name}` |" in facts.preset_table()


def test_every_listed_operator_is_named_once() -> None:
    text = facts.operator_table()
    assert all(text.count(f"`{name}`") == 1 for name in (*Operators().white, *Operators().black))
    assert [line.split(" | ")[0] for line in facts.operator_rule_table().splitlines()[2:]] == [
        f"| `{name}`" for name in ("own", "min_features", "multiple", "min_gain", "max_loop")
    ]


def test_every_error_has_a_line_and_a_meaning() -> None:
    names = [name for name in vars(errors) if name.endswith("Error")]
    lines = facts.error_table().splitlines()[2:]
    assert len(lines) == len(names)
    assert all(line.split(" | ")[2].strip(" |") for line in lines)


def test_every_key_of_a_run_file_says_what_it_means() -> None:
    lines = facts.run_file_table().splitlines()[2:]
    assert any(line.startswith("| `run.recipe` | `str` | `rotated` |") for line in lines)
    assert [line for line in lines if line.endswith("|  |")] == []


def test_the_page_of_results_names_every_closed_kind() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/results.md").read_text(encoding="utf-8")
    first = re.search(r"The last ones, from `(.+?)` on, are closed", page)
    assert first is not None
    names = re.findall(
        r"^\| `(.+?)` \|", page.partition("<!-- table: result-kinds -->")[2].partition("<!-- end -->")[0], re.M
    )
    assert names[names.index(first[1]) :] == [study.name for study in STUDIES]
