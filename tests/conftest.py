"""What every test relies on: a seed, few threads, and `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported: test shapes are small, and machines are shared.
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which reads it then

torch.set_num_threads(min(2, os.cpu_count() or 1, int(os.environ["OMP_NUM_THREADS"])))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def write_text() -> Callable[[Path], Path]:
    """Return what makes a folder with text enough for a few steps of the preset `tiny`, and gives it back."""

    def write(folder: Path) -> Path:
        folder.mkdir()
        for i in range(12):
            (folder / f"{i}.txt").write_text(f"the quick brown fox number {i} jumps over the lazy dog.\n" * 60)
        return folder

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
