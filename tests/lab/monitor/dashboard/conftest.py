"""A folder of synthetic runs, a server of any folder, and how bytes are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import synthetic_run

from octavo.lab.monitor.dashboard.packing import ALIGNMENT
from octavo_bench.pictures import served

Unpacked = tuple[dict[str, Any], dict[str, np.ndarray]]
Serve = Callable[[Path], str]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two runs at different depths; of 21 layers `layers.1.attention.wo` saturates."""
    root = tmp_path_factory.mktemp("runs")
    synthetic_run(root / "first", layers=21, steps=240)
    (root / "first" / "console.log").write_text("octavo 0.1.0: reading\nstep 60: loss spike -> skipped\n")
    written = {"step": 60, "prompt": "def f(", "text": {"fp8": "self):", "bf16": "<b>x"}}
    (root / "first" / "samples.jsonl").write_text(f"{json.dumps(written)}\n{{")
    synthetic_run(root / "sweep" / "tensorwise", layers=14, steps=120, recipe="tensorwise", seed=3)
    return root


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Return a function that serves a folder until the module's tests end and returns the address.

    Servers outlive the pages that use them: a page without a server reports errors, which fail its test.
    """
    for package in ("uvicorn", "starlette", "plotly"):
        pytest.importorskip(package)
    with ExitStack() as servers:
        yield lambda root: servers.enter_context(served(root))


@pytest.fixture(scope="session")
def unpack() -> Callable[[bytes], Unpacked]:
    """Return a function that unpacks bytes as the page does, at aligned offsets."""

    def unpacked(packed: bytes) -> Unpacked:
        size = int.from_bytes(packed[:4], "little")
        header = json.loads(packed[4 : 4 + size])
        body = -(-(4 + size) // ALIGNMENT) * ALIGNMENT
        found = {}
        for name, (kind, offset, shape) in header.pop("arrays").items():
            assert (body + offset) % np.dtype(kind).itemsize == 0
            count = int(np.prod(shape))
            found[name] = np.frombuffer(packed, f"<{kind}", count, body + offset).reshape(shape)
        return header, found

    return unpacked
