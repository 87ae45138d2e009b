"""Python's garbage collector, which must not run while a CUDA graph is captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_capturing = threading.RLock()
"""Held by the thread whose block has disabled the collector: a second one would see it disabled, and leave it so."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage, then none until the block ends: for the capture of a CUDA graph, one at a time.

    A graph in a reference cycle is destroyed by the collector, wherever that happens to run. CUDA forbids it during
    the capture of another graph, in any thread, and the process aborts.
    """
    with _capturing:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
