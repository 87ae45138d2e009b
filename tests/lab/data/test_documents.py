from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.lab.data.documents import TextFile, read_documents


def text_of(path: Path) -> str:
    (document,) = read_documents(TextFile(path.name, path))
    return document.text


def test_bytes_that_are_not_utf8_are_named_by_their_position(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fa\xe7ade")
    with pytest.raises(DataError, match=r"a\.txt: must be UTF-8 text, and byte 2 is not"):
        text_of(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n")
    assert text_of(path) == "one\r\n"
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert [document.text for document in read_documents(TextFile(lines.name, lines))] == ["one", "two"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        text_of(tmp_path / "gone.txt")


def test_rows_of_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "", "two"], "n": [1, 2, 3]}), path)
    documents = [(d.name, d.text) for d in read_documents(TextFile("a.parquet", path))]
    assert documents == [("a.parquet:0", "one"), ("a.parquet:2", "two")]


def test_parquet_without_text(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["one"]}), path)
    with pytest.raises(DataError, match=r"column 'text'; its columns are body"):
        list(read_documents(TextFile("a.parquet", path)))
    pq.write_table(pa.table({"text": ["one", None]}), path)
    with pytest.raises(DataError, match=r"row 1.*None"):
        list(read_documents(TextFile("a.parquet", path)))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pip install "octavo\[parquet\]"'):
        list(read_documents(TextFile("a.parquet", tmp_path / "a.parquet")))
