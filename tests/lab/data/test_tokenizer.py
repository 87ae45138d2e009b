from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import DataError
from octavo.lab.data import ByteTokenizer, load_tokenizer

TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXT)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_of_document, 271]) == text


def test_the_vocabulary_suits_an_fp8_gemm() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab % 16 == 0 and tokenizer.vocab > tokenizer.end_of_document > 255


def test_a_cut_character_is_marked() -> None:
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


def test_bytes_by_name() -> None:
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("byte", ["'byte'", "Did you mean 'bytes'"]),
        ("bpe", ["bpe-4096"]),
        ("bpe-x", ["bpe-<size>"]),
        ("bpe-4096²", ["bpe-<size>"]),
        ("bpe-4096", ["source"]),
        ("nowhere.json", ["nowhere.json", "no such"]),
    ],
)
def test_unknown_names(name: str, words: list[str]) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError) as caught:
        load_tokenizer(name)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r'pip install "octavo\[bpe\]"'):
        load_tokenizer(str(Path("some.json")))
