"""Export of a run of `octavo train`: weights of a checkpoint, and the tokenizer as transformers and engines read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.conversion import revert
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.data.bpe import END_OF_DOCUMENT, BPETokenizer
from octavo.lab.data.chat import ChatFormat
from octavo.lab.data.tokenizer import ByteTokenizer, Tokenizer
from octavo.lab.train.config import RunConfig
from octavo.lab.train.opening import open_run
from octavo.lab.train.setup import tokenizer_of
from octavo.nn.lora import merge_lora
from octavo.recipes import load
from octavo.serving.exporting import Exported, check, export
from octavo.serving.formats import BLOCKS, COMPRESSED_TENSORS


def export_run(
    run: Path,
    directory: Path,
    format: str = "",
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    step: int | None = None,
) -> Exported:
    """Export the model of a run; see `octavo.export`.

    Args:
        run: directory of a run or of one of its checkpoints, with any number of ranks.
        format: format name; by default that of the run's recipe.
        dtype: dtype of everything not in FP8.
        overwrite: replace an existing exported model.
        step: step of the checkpoint; by default the newest.

    Raises:
        CheckpointError: there is no checkpoint, or none of this step, or it cannot be read.
        ConfigError: see `octavo.export`.
        DataError: the run's tokenizer no longer exists.
        UnsupportedError: see `octavo.export`.
    """
    subject = open_run(run, step=step, by="octavo export", device="cpu")
    config, data = subject.config, subject.config.data
    tokenizer = tokenizer_of(data)
    texts = tokenizer_files(tokenizer, config.model.sequence)
    if data.format == "chat":
        chat = ChatFormat.of(data.tokenizer, data.sequence)
        tokens = {
            name: token for name, token in chat.tokens.items() if token
        }  # those that the template has in its text
        texts["tokenizer_config.json"] |= {**tokens, "chat_template": chat.template}
    more = {"eos_token_id": tokenizer.end_of_document}
    model = subject.states()[0].model
    format = format or format_of(config)
    _merge(model, config, format)
    return export(model, directory, format, dtype=dtype, overwrite=overwrite, config=more, texts=texts)


def _merge(model: nn.Module, config: RunConfig, format: str) -> None:
    """Add low-rank updates to the weights, if there are any."""
    if config.lora.rank:
        if format == "plain":  # codes would round the sums
            revert(model)
        merge_lora(model)


def export_flags(run: Path) -> str | None:
    """Return the flags with which `octavo export` takes a finished run, or None if no engine supports its model.

    Creates no weights.

    Raises:
        ConfigError: the files of the run are damaged.
    """
    overwrite = " --overwrite" if (run / "export").exists() else ""
    subject = open_run(run, new=True)
    model, config = subject.without_weights(), subject.config
    own = format_of(config)
    for format in dict.fromkeys((own, "plain")):
        if format != own:
            model = subject.without_weights()  # the other one is merged
        _merge(model, config, format)
        try:
            check(model, format)
        except (ConfigError, UnsupportedError):
            continue
        return ("" if format == own else f" --format {format}") + overwrite
    return None


def format_of(config: RunConfig) -> str:
    """Return the format for a run's recipe: `fp8` for blocks, which more engines support in that format."""
    recipe = load(config.run.recipe)
    if not recipe.is_fp8:
        return "plain"
    blocks = recipe.fprop.is_fp8 and recipe.fprop.weight.granularity == "128x128"
    return BLOCKS if blocks else COMPRESSED_TENSORS


_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
"""Bytes that byte-level tokenizers represent by the character of the same number; the others follow from 256 on."""


def tokenizer_files(tokenizer: Tokenizer, sequence: int) -> dict[str, Any]:
    """Return the JSON files of a tokenizer by name, with the ids of training and the end of a document as end of text.

    Args:
        sequence: maximum sequence length of the model.
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
    """Return the byte tokenizer as JSON for the package `tokenizers`: BPE without merges."""
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
