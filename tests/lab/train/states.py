"""`state.json` of a checkpoint, changed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.lab.train import checkpoint


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a checkpoint with its checksum."""
    plain = {key: value for key, value in state.items() if key != "sha256"}
    signed = {**plain, "sha256": checkpoint._digest(plain)}
    (path / "state.json").write_text(json.dumps(signed), encoding="utf-8")
