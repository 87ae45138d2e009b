"""What every test relies on: a seed, few threads, and `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def train_run(write_text: Callable[[Path], Path]) -> Callable[..., Path]:
    """Return what trains the preset `tiny`, of one layer, for two steps, in a folder that gets a text, and a run in it.

    `train_run(home, "name", model={"layers": 2}, steps=3)`: fields of `[run]` by name, other sections as mappings.
    """
    from octavo.train import train
    from octavo.train.config import assemble, load_preset

    def make(home: Path, name: str = "run", *, model: Any = None, optimizer: Any = None, **run: Any) -> Path:
        text = home / "text"
        settings = {
            "data": {"source": str(text if text.exists() else write_text(text)), "cache": str(home / "cache")},
            "model": {"layers": 1, **(model or {})},
            "optimizer": optimizer or {},
            "run": {"steps": 2, "device": "cpu", "twin": False, "eval_tokens": 512, **run, "out": str(home / name)},
        }
        train(assemble(load_preset("tiny", cuda=False), ("test", settings)))
        return home / name

    return make


@pytest.fixture(scope="session")
def octavo() -> Callable[[str | Sequence[object]], int]:
    """Return what runs a command, a line or its words, in this process and returns its exit code; it raises errors."""
    from octavo.cli.main import app

    def run(command: str | Sequence[object]) -> int:
        words = command if isinstance(command, str) else [str(word) for word in command]
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        assert isinstance(code, int)
        return code

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
