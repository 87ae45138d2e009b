"""A run's tokenizer as transformers and inference engines read it: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from typing import Any

from octavo.data.bpe import END_OF_DOCUMENT, BPETokenizer
from octavo.data.tokenizer import ByteTokenizer, Tokenizer

_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
"""Bytes that byte-level tokenizers write as the character of that number; all others come after 255, in order."""


def tokenizer_files(tokenizer: Tokenizer, sequence: int) -> dict[str, Any]:
    """Return the files of a tokenizer by name, JSON; ids are those of training, and the end of a document ends a text.

    Args:
        sequence: the longest one that the model knows.
    """
    known, end = _bytes(), END_OF_DOCUMENT
    if isinstance(tokenizer, BPETokenizer):
        known, end = json.loads(tokenizer.to_json()), tokenizer.end_token
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": known, "tokenizer_config.json": config}


def _bytes() -> dict[str, Any]:
    """Return the tokenizer whose ids are bytes, in the form of the package `tokenizers`: BPE without a merge."""
    others = [byte for byte in range(256) if byte not in _PRINTED]
    characters = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": ByteTokenizer.end_of_document, "content": END_OF_DOCUMENT, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **plain}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {characters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
