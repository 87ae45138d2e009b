"""`samples.jsonl`: what the models of a run wrote, a line per sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FILE = "samples.jsonl"
"""File name in a run's directory."""


def parse(text: str) -> tuple[list[Mapping[str, Any]], int]:
    """Return the samples in text, and the number of lines that are none, as a crash or a full disk leaves them.

    A sample has `step`, `prompt`, and `text` by name of the model. The last line is not read unless it is complete.
    """
    lines = text.split("\n")[:-1]
    found = [record for line in lines if (record := _sample(line)) is not None]
    return found, len(lines) - len(found)


def _sample(line: str) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"step": int, "prompt": str, "text": dict}
    is_sample = isinstance(record, dict) and all(type(record.get(key)) is kind for key, kind in kinds.items())
    return record if is_sample and all(isinstance(text, str) for text in record["text"].values()) else None
