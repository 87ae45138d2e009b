from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.lab.data import read_corpus
from octavo.lab.data.corpus import open_corpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "two\r\n", "a/z.md": "one", "c.py": "x = 3", "d.png": "no", ".git/e.txt": "no"})
    documents = [(d.name, d.text) for d in read_corpus(tmp_path)]
    assert documents == [("a/z.md", "one"), ("b.txt", "two\r\n"), ("c.py", "x = 3")]


def test_a_symbolic_link_shows_no_file_twice(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "folder/b.txt": "two"})
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    assert [d.name for d in read_corpus(tmp_path)] == ["a.txt", "folder/b.txt"]


def test_empty_files_in_a_folder_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "b.py": " \n", "c.py": "x = 1"})
    assert [d.name for d in read_corpus(tmp_path)] == ["c.py"]


def test_one_file_of_lines_gives_many_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("one", "two")]
    path = write(tmp_path, {"a.jsonl": "\n\n".join(lines)}) / "a.jsonl"
    assert [(d.name, d.text) for d in read_corpus(str(path))] == [("a.jsonl:1", "one"), ("a.jsonl:3", "two")]


def test_the_listing_changes_with_names_sizes_and_times_alone(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "b.txt": "two"})
    first = open_corpus(tmp_path).listing_sha256()
    assert open_corpus(tmp_path).listing_sha256() == first
    write(tmp_path, {"b.txt": "longer"})
    second = open_corpus(tmp_path).listing_sha256()
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert len({first, second, open_corpus(tmp_path).listing_sha256()}) == 3


@pytest.mark.parametrize(
    ("files", "source", "words"),
    [
        ({}, "nowhere", ["nowhere", "no such file"]),
        ({}, ".", ["contains no text", ".jsonl"]),
        ({"a.png": "x"}, ".", ["contains no text"]),
        ({"a.doc": "x"}, "a.doc", ["a.doc", ".doc", ".txt"]),
        ({"a.txt": ""}, "a.txt", ["a.txt", "empty"]),
        ({"a.txt": " \n"}, "a.txt", ["a.txt", "empty"]),
        ({"a.txt": "", "b.txt": ""}, ".", ["all 2 files are empty"]),
        ({"a.jsonl": '{"text": "x"}\n{"body": "x"}\n'}, "a.jsonl", ["a.jsonl:2", "'text'", "body"]),
        ({"a.jsonl": '{"text": "x"}\n\n{"text": 3}\n'}, "a.jsonl", ["a.jsonl:3", "string"]),
        ({"a.jsonl": "[1]\n"}, "a.jsonl", ["a.jsonl:1", "'text'"]),
        ({"a.jsonl": "{nonsense\n"}, "a.jsonl", ["a.jsonl:1", "malformed json"]),
        ({"a.jsonl": '{"text": "\\ud800"}\n'}, "a.jsonl", ["a.jsonl:1", "surrogate"]),
        ({"a.parquet": "nonsense"}, "a.parquet", ["a.parquet", "Parquet"]),
    ],
)
def test_bad_sources_say_where_and_what(tmp_path: Path, files: dict[str, str], source: str, words: list[str]) -> None:
    write(tmp_path, files)
    if source.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(DataError) as caught:
        list(read_corpus(tmp_path / source))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_misspelt_names_the_nearest() -> None:
    with pytest.raises(DataError, match="Did you mean 'english'"):
        read_corpus("englsh")
    with pytest.raises(DataError, match="Did you mean 'python-packages'"):
        read_corpus("python-package")


def test_what_is_missing_is_said_at_the_call_not_at_the_first_document(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_corpus(tmp_path / "nowhere.txt")
