"""`samples.jsonl`: what the models of a run wrote, a line per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo._util import config_reader
from octavo.errors import StoreError

FILE = "samples.jsonl"
"""File name in a run's directory."""


def parse(line: str, where: str) -> Mapping[str, Any]:
    """Return a line as `step`, `prompt`, and `text` by name of the model.

    Raises:
        StoreError: the line is no sample.
    """
    record: Mapping[str, Any] = config_reader.parse(line, where, StoreError)
    kinds = {"step": int, "prompt": str, "text": dict}
    is_sample = isinstance(record, dict) and all(type(record.get(key)) is kind for key, kind in kinds.items())
    if not is_sample or not all(isinstance(text, str) for text in record["text"].values()):
        raise StoreError(f"{where}: a line of samples has 'step', 'prompt', and 'text' by model. Move the file away.")
    return record
