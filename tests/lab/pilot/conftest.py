"""A workload of seconds, and a pilot whose measurements are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.conversion import make_plan
from octavo.kernels.runtime.devices import H200
from octavo.lab.pilot import open_subject
from octavo.lab.pilot.judging import Pilot
from octavo.lab.pilot.measuring import Measurement

MODULE = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :16].argmax(dim=1)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.fixture
def python_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    return file


@pytest.fixture
def make_pilot(python_file):
    """Return a function that makes a pilot from given measurements: name -> fields."""

    def make(measured: dict[str, dict[str, Any]], **changed: Any) -> Pilot:
        model = open_subject(python_file).build()
        found = {name: Measurement(precision=name, **fields) for name, fields in measured.items()}
        plans = {name: make_plan(model, name) for name in found if name not in ("bf16", "fp16", "fp32")}
        about = {
            "workload": "mine", "unit": "token", "tokens": 8192, "samples": 8, "data": "random", "device": "a GPU",
            "predicted_for": "", "capacity_gib": 100.0, "parameters": 10**9, "rows": 8192, "elsewhere": 0.2,
            "compiled": False, "rates": H200,
        }  # fmt: skip
        return Pilot(**(about | changed), measured=found, plans=plans)

    return make
