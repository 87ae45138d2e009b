"""The ids are those of training."""

from __future__ import annotations

import json

import pytest

from octavo.data.tokenizer import ByteTokenizer
from octavo.serving.tokenizer_files import tokenizer_files

tokenizers = pytest.importorskip("tokenizers")

TEXT = "def f(x):\n\treturn 'é∑' + x  # \x00\x7f\xad\xa0 ok\r\n"


def loaded(files):
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def test_bytes_are_ids():
    files = tokenizer_files(ByteTokenizer(), 64)
    backend = loaded(files)
    assert backend.encode(TEXT).ids == list(TEXT.encode()) == ByteTokenizer().encode(TEXT).tolist()
    assert backend.decode(backend.encode(TEXT).ids) == TEXT
    assert backend.token_to_id(files["tokenizer_config.json"]["eos_token"]) == ByteTokenizer.end_of_document
    everything = bytes(range(128)).decode() + "".join(map(chr, range(0x80, 0x800)))
    assert backend.encode(everything).ids == list(everything.encode())


def test_a_bpe_is_written_as_it_is():
    from octavo.data.bpe import BPETokenizer

    trained = BPETokenizer.train(["the cat sat on the mat " * 50], 272)
    files = tokenizer_files(trained, 64)
    assert loaded(files).encode("the cat sat").ids == trained.encode_batch(["the cat sat"])[0].tolist()
    assert loaded(files).token_to_id(files["tokenizer_config.json"]["eos_token"]) == trained.end_of_document
    assert files["tokenizer_config.json"]["model_max_length"] == 64
