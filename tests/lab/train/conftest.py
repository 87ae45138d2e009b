"""A corpus of a few kilobytes and runs of a few steps; `ranks`, which starts several, is in tests/distributed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.lab.train.config import RunConfig, assemble, load_preset

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "distributed")]
Configure = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text enough for a hundred batches of the preset `tiny`."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        lines = [f"line {j} of document {i} holds {i * j % 97} apples and {(i + j) ** 2 % 89} pears" for j in range(30)]
        (folder / f"{i}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def configure(corpus: Path, tmp_path: Path) -> Configure:
    """Return the preset `tiny`, of one layer, on that corpus, changed by section: `configure(run={"steps": 3})`.

    The corpus is tokenised once, and little of its held-out text is evaluated: that took half the time of a short run.
    """

    def make(**sections: dict[str, Any]) -> RunConfig:
        base = {
            "data": {"source": str(corpus), "cache": str(corpus.with_name("cache"))},
            "model": {"layers": 1},
            "run": {"out": str(tmp_path / "run"), "eval_tokens": 512},
        }
        return assemble(load_preset("tiny", cuda=False), ("test corpus", base), ("test", sections))

    return make
