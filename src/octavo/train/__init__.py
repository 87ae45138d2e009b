"""Training: an FP8 model and its BF16 baseline on the same batches, with checkpoints that resume bit for bit.

`RunConfig` needs no torch; the other names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.train.loss_scale import LossScale
    from octavo.train.run import train

__all__ = ["LossScale", "RunConfig", "train"]

_MODULES = {"LossScale": "loss_scale", "train": "run"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'octavo.train' has no attribute '{name}'")
    return getattr(importlib.import_module(f"octavo.train.{_MODULES[name]}"), name)
