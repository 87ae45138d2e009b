"""What the coefficients of a step are computed from, on the device; see `octavo.kernels.coefficients`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.coefficients import HYPER, Own
from octavo.kernels.uploads import Uploads


def hyperparameters(
    groups: Sequence[dict[str, Any]], clip: float | None, uploads: Uploads, device: torch.device
) -> Tensor:
    """Return the settings of each group, FP64 (G, len(HYPER)). A learning rate that is a tensor is read on the device.

    Args:
        clip: the largest norm of the gradients of all groups.
    """
    rows = tuple(
        (
            0.0 if isinstance(group["lr"], Tensor) else float(group["lr"]),
            *(group["betas"] if "betas" in group else (group["momentum"], 0.0)),
            group.get("eps", 0.0),
            group["weight_decay"],
            -1.0 if group["maximize"] else 1.0,
            math.inf if group["clip"] is None else group["clip"],
            math.inf if clip is None else clip,
        )
        for group in groups
    )
    table = uploads("hyperparameters", rows, lambda: torch.tensor(rows, dtype=torch.float64), device)
    for index, group in enumerate(groups):
        if isinstance(group["lr"], Tensor):
            table[index, HYPER.index("lr")] = group["lr"].detach().to(device)
    return table


def of_parameters(own: tuple[Own, ...], uploads: Uploads, name: int, device: torch.device) -> Tensor:
    """Return what each parameter has of its own, FP64 (P, len(Own._fields))."""

    def table() -> Tensor:
        return torch.tensor(own, dtype=torch.float64).reshape(-1, len(Own._fields))

    return uploads(("own", name), own, table, device)
