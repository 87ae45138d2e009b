"""A run of a few steps beside its BF16 twin, and one without FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.train import train
from octavo.train.config import assemble, load_preset


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, write_text: Callable[[Path], Path]) -> Path:
    """Return a directory with `text`, and the runs `folded`, with checkpoints of steps 20 and 30, and `bf16`."""
    home = tmp_path_factory.mktemp("runs")
    write_text(home / "text")
    data = {"source": str(home / "text"), "cache": str(home / "cache")}
    how: dict[str, Any] = {"device": "cpu", "eval_tokens": 2048, "telemetry_every": 0, "histograms_every": 0}
    kinds = {"folded": {"steps": 30, "checkpoint_every": 10}, "bf16": {"steps": 2, "recipe": "bf16"}}
    for name, kind in kinds.items():
        run = how | kind | {"out": str(home / name)}
        settings = {"model": {"layers": 1}, "optimizer": {"lr": 1e-2}, "data": data, "run": run}
        train(assemble(load_preset("tiny", cuda=False), ("test", settings)))
    return home
