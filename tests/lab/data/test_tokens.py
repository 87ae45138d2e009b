from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, DataError
from octavo.lab.data import ByteTokenizer, TokenFiles, prepare, tokens


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "my texts"
    folder.mkdir()
    for i in range(50):
        (folder / f"{i}.txt").write_text(f"document number {i}\n" * 20)
    return folder


def prepared(source: Path, tmp_path: Path, **change: Any) -> TokenFiles:
    return prepare(source, change.pop("tokenizer", ByteTokenizer()), tmp_path / "cache", **change)


def test_the_files_are_what_meta_says(source: Path, tmp_path: Path) -> None:
    files = prepared(source, tmp_path)
    train, heldout = (np.fromfile(path, dtype="<u2") for path in (files.train, files.heldout))
    assert (len(train), len(heldout)) == (files.train_tokens, files.heldout_tokens)
    assert files.documents + files.heldout_documents == 50
    assert (files.source, files.tokenizer, files.vocab) == (str(source), "bytes", 272)
    assert 2 < files.unigram_entropy < 4
    assert files.directory.name.startswith("my-texts-bytes-")
    meta = json.loads((files.directory / "meta.json").read_text())
    assert meta["unigram_entropy"] == files.unigram_entropy and "directory" not in meta
    assert TokenFiles.read(files.directory) == files
    assert sorted(path.name for path in files.directory.parent.iterdir()) == [files.directory.name]


def test_the_second_time_nothing_is_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(source, tmp_path)
    monkeypatch.setattr(tokens, "encode_split", None)
    assert prepared(source, tmp_path) == first


def test_another_corpus_tokenizer_or_share_gives_other_files(source: Path, tmp_path: Path) -> None:
    class OtherTokenizer(ByteTokenizer):
        fingerprint = "other"

    folders = [prepared(source, tmp_path).directory, prepared(source, tmp_path, heldout=0.1).directory]
    folders.append(prepared(source, tmp_path, tokenizer=OtherTokenizer()).directory)
    os.utime(source / "7.txt", (1, 1))
    folders.append(prepared(source, tmp_path).directory)
    (source / "7.txt").unlink()
    folders.append(prepared(source, tmp_path).directory)
    assert len(set(folders)) == 5


def test_the_same_text_gives_the_same_files(source: Path, tmp_path: Path) -> None:
    first = prepared(source, tmp_path)
    second = prepare(source, ByteTokenizer(), tmp_path / "elsewhere")
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.heldout.read_bytes() == second.heldout.read_bytes()


@pytest.mark.parametrize("damage", ["train.bin", "meta.json"])
def test_damaged_files_are_made_again(source: Path, tmp_path: Path, damage: str) -> None:
    first = prepared(source, tmp_path)
    before = first.train.read_bytes()
    (first.directory / damage).write_bytes(b"{")
    with pytest.raises(DataError):
        TokenFiles.read(first.directory)
    assert prepared(source, tmp_path) == first and first.train.read_bytes() == before


def test_another_process_that_was_first_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokens.encode_split

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(tokens, "encode_split", encode)
        prepared(source, tmp_path)
        return encode(*arguments)

    monkeypatch.setattr(tokens, "encode_split", overtaken)
    files = prepared(source, tmp_path)
    assert TokenFiles.read(files.directory) == files
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_no_space_left_leaves_nothing(source: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DataError, match=r"MiB are needed, and the token files could not be written"):
            prepared(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache").iterdir()) == []
    assert prepared(source, tmp_path).documents > 0


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match="cannot be written here"):
        prepared(source, tmp_path)


def test_a_bad_corpus_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        prepared(path, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2, float("nan")])
def test_a_share_that_is_none_is_refused_before_anything(source: Path, tmp_path: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="heldout"):
        prepared(source, tmp_path, heldout=share)
    assert not (tmp_path / "cache").exists()
