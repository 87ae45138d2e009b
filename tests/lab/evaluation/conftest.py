"""A run of a few steps beside its BF16 baseline, and one without FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, train_run: Callable[..., Path]) -> Path:
    """Return a directory of runs: `folded`, with checkpoints of steps 20 and 30, `rotated`, `fp8_weights`,
    `bf16_fprop` and `bf16`."""
    home = tmp_path_factory.mktemp("runs")
    how: dict[str, Any] = {"baseline": True, "eval_tokens": 2048, "telemetry_every": 0, "histograms_every": 0}
    train_run(home, "folded", recipe="folded", optimizer={"lr": 1e-2}, steps=30, checkpoint_every=10, **how)
    train_run(home, "rotated", recipe="rotated", steps=2, **{**how, "baseline": False})
    train_run(home, "fp8_weights", weights="fp8", steps=2, **how)
    train_run(home, "bf16_fprop", recipe="rowwise_bf16_fprop", steps=2, **how)
    train_run(home, "bf16", optimizer={"lr": 1e-2}, recipe="bf16", **how)
    return home
