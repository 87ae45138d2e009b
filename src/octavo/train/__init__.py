"""Training: a model in FP8 and its BF16 twin in lockstep, with checkpoints that continue bit for bit.

`RunConfig` needs no torch; `train` loads it on first use, so that the command line stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.train.run import train

__all__ = ["RunConfig", "train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module 'octavo.train' has no attribute '{name}'")
    from octavo.train.run import train

    return train
