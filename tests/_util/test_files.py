"""A file is written whole or not at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from octavo._util import files
from octavo._util.checksums import check_regular
from octavo._util.files import put_in_place, remove, write_text
from octavo.errors import ConfigError


def test_it_replaces_a_file_and_makes_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"
    write_text(file, "one", ConfigError, mkdir=True)
    write_text(file, "zwei ü\n", ConfigError)
    assert file.read_text("utf-8") == "zwei ü\n" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("place", ["missing/file", "plain/file"])
def test_what_fails_is_named_and_leaves_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "plain").touch()
    with pytest.raises(ConfigError, match=rf"{place}: cannot be written \("):
        write_text(tmp_path / place, "text", ConfigError)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_failure_keeps_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_text(file, "after", ConfigError)
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def named(folder: Path, name: str) -> Path:
    """Return a directory with a file that says its name."""
    (folder / name).mkdir()
    (folder / name / "file").write_text(name)
    return folder / name


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    folder = named(tmp_path, "folder")
    for name, target in (("to-folder", folder), ("to-file", folder / "file"), ("to-nothing", tmp_path / "gone")):
        (tmp_path / name).symlink_to(target)
        remove(tmp_path / name)
    assert [*tmp_path.iterdir()] == [folder] and (folder / "file").read_text() == "folder"
    remove(folder / "file")
    remove(folder)
    remove(folder)
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = named(tmp_path, "folder")

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.shutil, "rmtree", refuse)
    with pytest.raises(PermissionError):
        remove(folder)


def test_a_directory_takes_the_place_of_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "final").symlink_to(tmp_path / "gone")
    put_in_place(named(tmp_path, "new"), tmp_path / "final")
    assert not (tmp_path / "final").is_symlink() and [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(OSError, match="a pipe, socket or device, not a file"):
        check_regular(path)


@pytest.mark.parametrize("left", [[], [".old-final"], ["final"], ["final", ".old-final"]])
def test_a_directory_takes_the_place_of_another(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        named(tmp_path, name)
    put_in_place(named(tmp_path, "new"), tmp_path / "final")
    assert [(path.name, (path / "file").read_text()) for path in tmp_path.iterdir()] == [("final", "new")]


def test_a_directory_that_cannot_be_replaced_is_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, new, rename = named(tmp_path, "final"), named(tmp_path, "new"), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == new:
            raise PermissionError
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        put_in_place(new, before)
    assert {*tmp_path.iterdir()} == {before, new} and (before / "file").read_text() == "final"


def test_a_directory_is_flushed_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine no directory has its final name and lacks files."""
    seen: list[tuple[str, bool]] = []
    final = tmp_path / "final"
    monkeypatch.setattr(files, "flush", lambda path: seen.append((path.name, final.exists())))
    put_in_place(named(tmp_path, "new"), final)
    assert seen == [("new", False), (tmp_path.name, True)]
