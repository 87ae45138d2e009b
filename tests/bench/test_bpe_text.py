"""Tokenised text of the parity study: a file that is its own evidence, and sizes that only it fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo_bench import bpe_text, ladder, parity
from octavo_bench.installed_text import installed_text
from octavo_bench.kind import Output

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 400 documents, of which some are held out by their hash."""
    root = tmp_path_factory.mktemp("sources")
    for number in range(400):
        (root / f"{number}.py").write_text(f"def function_{number}(argument):\n    return argument + {number}\n" * 6)
    return root


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "text.npz"
    assert bpe_text.write(folder, file, vocab=512) == 0
    return file


def test_tokens_are_those_of_the_documents_that_bytes_are_read_of(folder: Path, file: Path) -> None:
    text, plain = bpe_text.read(file), installed_text([folder])
    assert text.train.dtype == torch.int16 and 256 < int(text.train.max()) < text.vocab <= 512
    assert [*text.heldout] == [*plain.heldout] == ["python"]
    assert text.bytes_per_token == pytest.approx(len(plain.train) / len(text.train)) and text.bytes_per_token > 2
    assert len(text.heldout["python"]) < len(plain.heldout["python"]) / 2
    assert (plain.vocab, plain.bytes_per_token) == (272, 1.0)


def test_the_digest_is_that_of_ids_and_vocabulary(folder: Path, file: Path, tmp_path: Path) -> None:
    again, cut, other = (tmp_path / name for name in ("again.npz", "cut.npz", "other.npz"))
    bpe_text.write(folder, again, vocab=512)
    bpe_text.write(folder, cut, vocab=512, tokens=1000)
    with np.load(file) as stored:
        np.savez_compressed(other, **{**dict(stored), "vocab": 1024})
    texts = [bpe_text.read(path) for path in (file, again, cut, other)]
    assert texts[0].digest == texts[1].digest and len({text.digest for text in texts}) == 3
    assert torch.equal(texts[2].train, texts[0].train[:1000])


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_a_file_of_another_kind_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "text.npz"
    if content is None:
        np.savez(path, train=np.zeros(3))
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match="no tokenised text"):
        bpe_text.read(path)


def test_a_session_on_tokens_reports_per_token_and_per_byte(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "COMMITTED", tmp_path / "none")
    session = parity.Session(pairs=1, device="cpu", text=file)
    for sizes, fits in (("tiny", False), ("tiny-bpe", True)):
        own = {"sizes": sizes, "conditions": "half", "recipes": "folded", "session": session}
        if not fits:
            with pytest.raises(ConfigError, match="ids, but tiny has 272"):
                parity.command(**own, output=Output(write=tmp_path))
            continue
        assert parity.command(**own, output=Output(write=tmp_path)) == 0
    rows = ladder.read_rows(tmp_path)
    text = bpe_text.read(file)
    assert {(row["text"], row["bytes_per_token"]) for row in rows} == {(text.digest, round(text.bytes_per_token, 6))}
    loss = rows[0][ladder.decisive(rows)]
    expected = f"{loss:.4f} nats per token, {loss / text.bytes_per_token:.4f} per byte"
    assert expected in ladder.report([row for row in rows if row["recipe"] == "bf16"])
