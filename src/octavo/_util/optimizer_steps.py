"""Callbacks after the steps of PyTorch's optimizers, one per training step also where an optimizer wraps others.

PyTorch calls global post hooks after every `step`: those of the optimizers inside a wrapper too, as in `GreedyZeRO` or
PyTorch's `ZeroRedundancyOptimizer`, and twice for a subclass that calls `super().step()`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo._util.compiler import run_eagerly

Callback = Callable[[Sequence[Optimizer]], None]

_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Code of the function that PyTorch wraps around every `step` to call the hooks."""
_callbacks: list[Callback] = []


class _Inner(threading.local):
    """Optimizers that have stepped inside the outermost step of this thread."""

    def __init__(self) -> None:
        self.stepped: list[Optimizer] = []


_inner = _Inner()


def after_outermost_step(callback: Callback) -> Callable[[], None]:
    """Call back after each outermost optimizer step with all optimizers that stepped in it, the outermost last.

    After a step that raises nothing is called.

    Returns:
        A function that ends this.
    """
    _callbacks.append(callback)
    return lambda: _callbacks.remove(callback)


def _is_inner() -> bool:
    """Return whether the step that calls this hook was called by another step.

    The frames tell. A count of the steps that have begun would stay wrong after one that raised.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps == 2


@run_eagerly
def _before(*_: Any) -> None:
    if not _is_inner():
        _inner.stepped.clear()  # left by an outermost step that raised


@run_eagerly
def _after(optimizer: Optimizer, *_: Any) -> None:
    _inner.stepped.append(optimizer)
    if not _is_inner():
        stepped = _inner.stepped.copy()
        _inner.stepped.clear()
        for callback in [*_callbacks]:  # one may end itself
            callback(stepped)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
