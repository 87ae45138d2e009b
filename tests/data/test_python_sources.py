from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

import pytest

from octavo.data import python_sources, read_corpus
from octavo.data.documents import TextFile
from octavo.errors import DataError

CODE = "def double(x):\n    return 2 * x\n"


def files_of(tmp_path: Path, texts: dict[str, bytes]) -> list[TextFile]:
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return [TextFile(name, tmp_path / name) for name in texts]


def test_the_standard_library_is_there_without_its_tests() -> None:
    files = python_sources.standard_library()
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
    names = [file.name for file in python_sources.packages()]
    assert names == ["packages/first/core.py", "packages/second/core.py"]


def test_packages_come_after_the_standard_library() -> None:
    named = {file.name.partition("/")[0] for file in python_sources.packages()}
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
    names = [d.name for d in python_sources.read_sources(files_of(tmp_path, texts))]
    assert names == ["a.py", "greek.py"]


def test_a_file_that_vanished_is_left_out(tmp_path: Path) -> None:
    files = [*files_of(tmp_path, {"a.py": CODE.encode()}), TextFile("gone.py", tmp_path / "gone.py")]
    assert [d.name for d in python_sources.read_sources(files)] == ["a.py"]


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="no readable Python sources"):
        list(python_sources.read_sources([]))
