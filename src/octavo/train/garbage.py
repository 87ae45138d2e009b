"""Python's garbage collector leaves alone what lives as long as a run.

Now and then it looks through every object that there is. Compilers leave many hundred thousand, and it takes as long as
a step: on each rank in another step, and all others wait for that rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SETTLED = 3
"""Steps after which nothing is compiled any more, as a rule."""


@contextmanager
def spared(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step of a run; when the block ends, the collector sees all objects again.

    On a CPU it does nothing: no step is so short there that it matters.
    """
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps == SETTLED and device.type == "cuda":
            gc.collect()
            gc.freeze()

    try:
        yield after_step
    finally:
        gc.unfreeze()
