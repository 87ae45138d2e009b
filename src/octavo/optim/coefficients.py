"""What a step multiplies by, a row a parameter, computed on the device in FP64: nothing here waits for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.optimizer import COEFFICIENTS
from octavo.kernels.uploads import Uploads
from octavo.optim.states import RuleName

_KEYS = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "clip")


class Own(NamedTuple):
    """What a parameter has of its own, beside the settings of its group."""

    bound: float
    """Of |update|, in learning rates."""
    lr_ratio: float = 1.0
    """Its learning rate, in that of its group."""
    averages: bool = False
    """Whether the momentum takes 1 - beta1 of a gradient, as an average does, where the kernel's adds all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipped:
    """What clipping and the search for overflows found."""

    factors: Tensor
    """FP64 (P,): what gradients are multiplied by."""
    skip: Tensor
    """Boolean, shape (): a gradient is not finite."""
    norm: Tensor | None
    """FP32, shape (): the global norm before clipping; None where nobody asked for it."""


def hyperparameters(groups: Sequence[dict[str, Any]], uploads: Uploads, device: torch.device) -> Tensor:
    """Return the settings of each group, FP64 (G, 7). A learning rate that is a tensor is read on the device."""
    rows = tuple(
        (
            0.0 if isinstance(group["lr"], Tensor) else float(group["lr"]),
            *(group["betas"] if "betas" in group else (group["momentum"], 0.0)),
            group.get("eps", 0.0),
            group["weight_decay"],
            -1.0 if group["maximize"] else 1.0,
            float("inf") if group["clip"] is None else group["clip"],
        )
        for group in groups
    )
    table = uploads("hyperparameters", rows, lambda: torch.tensor(rows, dtype=torch.float64), device)
    for index, group in enumerate(groups):
        if isinstance(group["lr"], Tensor):
            table[index, 0] = group["lr"].detach().to(device)
    return table


def clip(
    squares: Tensor | None,
    of_group: Tensor,
    hyper: Tensor,
    *,
    limit: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Clipped:
    """Return the factors that clip first each group, then all, to their limits, from the sums of squares (P,).

    As in `torch.nn.utils.clip_grad_norm_`, a norm above its limit is multiplied by limit / (norm + 1e-6).

    Args:
        of_group: int64 (P,), the group of each parameter.
        squares: of the gradients as they are, multiplied by `grad_scale`; None where no norm is needed.
        over_ranks: sums the squares of each group, FP64 (G,), over ranks that have other parameters of it.
    """
    inverse = torch.ones_like(hyper[0, 0]) if grad_scale is None else grad_scale.double().reshape(()).reciprocal()
    factors = (hyper[:, _KEYS.index("sign")] * inverse)[of_group]
    skip = torch.zeros((), dtype=torch.bool, device=hyper.device)
    if found_inf is not None:
        skip = skip | (found_inf.reshape(()) > 0)
    if squares is None:
        return Clipped(factors=factors, skip=skip, norm=None)
    true = squares * inverse.square()
    members = (torch.arange(len(hyper), device=hyper.device)[:, None] == of_group).double()
    # A sum over the members of each group that is the same every time, which index_add on a GPU is not.
    of_groups = torch.where(members > 0, true, 0.0).sum(dim=1)
    of_groups = of_groups if over_ranks is None else over_ranks(of_groups)
    norm, group_norms = of_groups.sum().sqrt(), of_groups.sqrt()
    kept = (hyper[:, _KEYS.index("clip")] / (group_norms + 1e-6)).clamp(max=1.0)
    if limit is not None:
        kept = kept * (limit / ((kept * group_norms).square().sum().sqrt() + 1e-6)).clamp(max=1.0)
    return Clipped(factors=factors * kept[of_group], skip=skip | ~norm.isfinite(), norm=norm.float())


def table(rule: RuleName, hyper: Tensor, of_group: Tensor, steps: Tensor, factors: Tensor, own: Tensor) -> Tensor:
    """Return the coefficients, FP32 (P, len(COEFFICIENTS)).

    Args:
        hyper: of `hyperparameters`.
        steps: FP64 (P,), the number of this step, from 1.
        own: FP64 (P, 3), an `Own` a parameter.
    """
    lr, beta1, beta2, eps, decay, _, _ = hyper[of_group].unbind(dim=1)
    bounds, lr_ratio, averages = own.unbind(dim=1)
    steps = steps.clamp(min=1)  # a first step that is skipped
    columns = {
        "factor": torch.where(averages > 0, factors * (1 - beta1), factors),
        "first_share": 1 - beta1,
        "second_decay": beta2,
        "second_share": 1 - beta2,
        "first_correction": 1 / (1 - beta1**steps),
        "root_correction": (1 - beta2**steps).rsqrt(),
        "eps": eps,
        "lr": lr * lr_ratio,
        "weight_kept": torch.ones_like(lr) if rule == "adam" else 1 - lr * decay,
        "weight_decay": decay,
        "largest_update": bounds,
        "first_decay": beta1,
    }
    return torch.stack([columns[name] for name in COEFFICIENTS], dim=1).float()
