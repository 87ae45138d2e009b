"""The API reference: signatures as they are written, docstrings as Markdown, nothing that differs between two calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from octavo import optim
from octavo_bench import api

Call = object


def every(a: int, b: dict[str, int], /, c: str = "x, y", *rest: float, d: Call = print, **more: bool) -> int:
    """Return one.

    A second paragraph.

    Args:
        a: the first, which
            goes on.
        c, d: two at once: with a colon.

    Raises:
        ValueError: never.
    """
    return 1


@dataclass
class Settings:
    """Fields."""

    size: int = 3
    """How
    large."""
    parts: list[int] = field(default_factory=list)
    kind: object = object()
    _hidden: int = 0

    @property
    def whole(self) -> int:
        """All of it.

        Left out.
        """
        return self.size

    def times(self, by: int, *, twice: bool = False) -> int:
        """Return a product."""
        return by

    def plain(self) -> None:
        pass


def test_a_signature_is_as_written_with_every_kind_of_parameter() -> None:
    assert api._signature(every) == (
        "(\n    a: int,\n    b: dict[str, int],\n    /,\n    c: str = 'x, y',\n    *rest: float,\n"
        "    d: Call = <built-in function print>,\n    **more: bool,\n) -> int"
    )
    assert api._signature(Settings.times) == "(by: int, *, twice: bool = False) -> int"


def test_sections_of_a_docstring_become_lists() -> None:
    assert [*api._text(api.inspect.getdoc(every) or "")] == [
        "Return one.",
        "A second paragraph.",
        "**Arguments**",
        "- `a`: the first, which goes on.\n- `c, d`: two at once: with a colon.",
        "**Raises**",
        "- `ValueError`: never.",
    ]


def test_a_dataclass_is_its_fields_and_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "named", lambda name: Settings)
    lines = api.entry("octavo.Settings").splitlines()
    assert "| `size` | `int` | `3` | How large. |" in lines and "| `parts` | `list[int]` | `list()` |  |" in lines
    assert "| `kind` | `object` | `...` |  |" in lines
    assert lines[-2:] == [
        "- `whole`: All of it.",
        "- `times(by: int, *, twice: bool = False) -> int`: Return a product.",
    ]


def test_no_entry_has_an_address_or_an_empty_text() -> None:
    for name in api.SECTIONS:
        text = api.section(name)
        assert " at 0x" not in text and "\n\n\n" not in text and text == api.section(name)


def test_an_optimizer_that_was_made_does_not_change_the_page() -> None:
    before = api.section("train")
    optim.AdamW([nn.Parameter(torch.zeros(4, 4))])
    assert "step" in vars(optim.AdamW) and api.section("train") == before
