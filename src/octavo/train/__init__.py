"""Training: an FP8 model and its BF16 baseline on the same batches, with checkpoints that resume bit for bit.

`RunConfig` needs no torch; the other names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.lazy import lazy
from octavo.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.train.loss_scale import LossScale
    from octavo.train.run import train

__all__ = ["LossScale", "RunConfig", "train"]

__getattr__ = lazy(__name__, {"loss_scale": "LossScale", "run": "train"})
