"""Settings of parameter groups: what is refused, and what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError


def limit(name: str, value: float | None) -> float | None:
    """Return a limit as it is.

    Raises:
        ConfigError: it is not positive.
    """
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"optimizer {name}: {value} is not a positive number. None leaves gradients as they are.")
    return value


def check_group(group: Mapping[str, Any]) -> None:
    """See to it that the settings of a group can be stepped with.

    Raises:
        ConfigError: one is out of range.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(f"optimizer lr: a tensor of shape {tuple(lr.shape)} is not one learning rate.")
    elif not 0 <= lr < math.inf:
        raise ConfigError(f"optimizer lr: {lr} is not at least 0.")
    if not all(0 <= beta < 1 for beta in group.get("betas", ())):
        raise ConfigError(f"optimizer betas: {tuple(group['betas'])} must both be at least 0 and below 1.")
    for name in ("eps", "weight_decay"):
        if not 0 <= group.get(name, 0) < math.inf:
            raise ConfigError(f"optimizer {name}: {group[name]} is not at least 0.")
    limit("clip", group["clip"])
