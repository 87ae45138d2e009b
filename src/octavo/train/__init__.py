"""Training: a model in FP8 and its BF16 twin in lockstep, with checkpoints that continue bit for bit.

`RunConfig` needs no torch; the others load it on first use, so that the command line stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.train.loss_scale import LossScale
    from octavo.train.run import train

__all__ = ["LossScale", "RunConfig", "train"]

_HOME = {"LossScale": "octavo.train.loss_scale", "train": "octavo.train.run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo.train' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
