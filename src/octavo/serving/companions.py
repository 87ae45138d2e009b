"""Files beside the weights of a model of transformers: how it generates, its tokenizer and its chat template."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from octavo.errors import ConfigError

GENERATION = "generation_config.json"
_OF_A_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Files that `save_pretrained` of tokenizers and processors writes."""
NO_TOKENIZER = (
    "no tokenizer is written, and engines need one: pass octavo.export(..., tokenizer=tokenizer), or load the model "
    "from a directory that has it"
)


def companions(model: nn.Module, tokenizer: Any = None) -> dict[str, Any]:
    """Return further files of a model by name: bytes, or JSON as Python values.

    Args:
        model: of transformers, whose `generation_config` is taken along; others have none.
        tokenizer: a tokenizer or a processor of transformers, or a directory with its files; None: those in the
            directory that the model was loaded from, if it was one.

    Raises:
        ConfigError: a tokenizer of another kind, or a directory without one.
    """
    contents: dict[str, Any] = {}
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(generation, "to_json_string"):
        contents[GENERATION] = json.loads(generation.to_json_string())
    if hasattr(tokenizer, "save_pretrained"):
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            return contents | _files_in(Path(directory))
    if tokenizer is None:
        origin = getattr(getattr(model, "config", None), "_name_or_path", "")
        return contents | (_files_in(Path(origin)) if origin and Path(origin).is_dir() else {})
    if not isinstance(tokenizer, str | Path) or not has_tokenizer(found := _files_in(Path(tokenizer))):
        raise ConfigError(
            f"export: tokenizer {tokenizer!r} is neither a tokenizer of transformers nor a directory with its files."
        )
    return contents | found


def has_tokenizer(files: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer is among files."""
    return not files.keys().isdisjoint(("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"))


def _files_in(directory: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files, further chat templates included."""
    paths = [directory / name for name in _OF_A_TOKENIZER]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
