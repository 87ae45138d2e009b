"""Entries of an index: every change of a file is noticed, and no remedy is given for what is no damage."""

import hashlib
from pathlib import Path

import pytest

from octavo._util.checksums import check_file, file_entry
from octavo.errors import CheckpointError


def test_an_entry_is_the_size_and_the_sha256(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"some bytes")
    assert file_entry(file) == {"bytes": 10, "sha256": hashlib.sha256(b"some bytes").hexdigest()}
    check_file(file, file_entry(file))
    check_file(file, {"bytes": 10})


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"some byte", "truncated, 9 of 10 bytes. Go back."), (b"some bytez", "damaged: .* Go back.")],
)
def test_a_changed_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"some bytes")
    entry = file_entry(file)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file}: {message}"):
        check_file(file, entry, " Go back.")


def test_a_file_that_must_not_be_read_is_not_advised_against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"some bytes")
    entry = file_entry(file)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError) as error:
        check_file(file, entry, " Remove it.")
    assert str(error.value) == f"{file}: cannot be read (Permission denied)."
