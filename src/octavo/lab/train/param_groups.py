"""The optimizer of a run and its parameter groups, with settings by name pattern.

A pattern (`*` matches anything, dots included) is compared with the name of a parameter and of its module: `*.wq` and
`*.wq.weight` select the same. The last matching pattern wins, as in a recipe's `modules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.runtime.dispatch import is_plain
from octavo.lab.train.config import OptimizerConfig
from octavo.optim import AdamW, Lion, Muon, keep_small
from octavo.tensor import local


def value_of(names: Iterable[str], patterns: Mapping[str, float], where: str) -> dict[str, float]:
    """Return the value of each parameter that a pattern matches.

    Args:
        names: parameter names.
        patterns: pattern -> value.
        where: the setting, for error messages.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = list(names)
    values: dict[str, float] = {}
    for pattern, value in patterns.items():
        matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(_module(name), pattern)]
        if not matched:
            near = did_you_mean(pattern, dict.fromkeys(known for name in names for known in _candidates(name)))
            raise ConfigError(f"{where}: '{pattern}' matches no trained parameter.{near}")
        values |= dict.fromkeys(matched, value)
    return values


def groups_of(names: Iterable[str], patterns: Mapping[str, float], where: str) -> list[tuple[float, list[str]]]:
    """Return each pattern's value and the parameters it applies to; arguments as for `value_of`."""
    owners = value_of(names, {pattern: i for i, pattern in enumerate(patterns)}, where)
    owned = [[name for name, owner in owners.items() if owner == i] for i in range(len(patterns))]
    return [(value, group) for value, group in zip(patterns.values(), owned, strict=True) if group]


def make_optimizer(
    trained: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    lr_factors: Mapping[str, float],
    seed: int,
    *,
    clips: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimizer: PyTorch's fused AdamW if weights and moments are FP32, else one of `octavo.optim`.

    PyTorch's keeps no master weights: BF16 weights would lose every update below half a unit in the last place.

    Args:
        trained: parameters by name.
        config: settings.
        lr_factors: factor on the learning rate by name.
        seed: of stochastic rounding.
        clips: clip in the step, as with gradients in FP8; never PyTorch's.
    """
    groups = _groups(trained, config.weight_decay, lr_factors)
    lr, betas, eps = config.lr, config.betas, config.eps
    is_fp32 = all(is_plain(local(weight)) and weight.dtype == torch.float32 for weight in trained.values())
    if is_fp32 and not clips and (config.name, config.states, config.gradients) == ("adamw", "fp32", "wide"):
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    # High-precision gradients are clipped and checked by `TrainState`; the optimizer need not read them again for that.
    clips = clips or config.gradients == "fp8"
    settings: dict[str, Any] = {"gradients": config.gradients, "clip": config.clip or None if clips else None}
    settings |= {"states": config.states, "seed": seed, "skip_nonfinite": clips}
    settings |= {"keep": _keep_fp32} if config.states == "fp32" else {}
    if config.name == "lion":
        return Lion(groups, lr=lr, betas=betas, **settings)
    if config.name == "muon":
        return Muon(groups, lr=lr, momentum=config.momentum, adamw={"betas": betas, "eps": eps}, **settings)
    return AdamW(groups, lr=lr, betas=betas, eps=eps, **settings)


def _keep_fp32(name: str, parameter: Tensor) -> str | None:
    """Return `fp32` for embeddings too, which would be `exact`; gradients of all small parameters stay unquantised."""
    return "fp32" if keep_small(name, parameter) else None


def _groups(
    trained: Mapping[str, nn.Parameter], weight_decay: float, lr_factors: Mapping[str, float]
) -> list[dict[str, object]]:
    """Return named parameter groups, one per learning-rate factor, without weight decay for norms and biases."""
    groups: dict[tuple[bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trained.items():
        groups.setdefault((parameter.ndim < 2, lr_factors.get(name, 1.0)), []).append((name, parameter))
    return [
        {"params": named, "weight_decay": 0.0 if is_vector else weight_decay, "lr_factor": factor}
        for (is_vector, factor), named in sorted(groups.items(), key=lambda item: item[0])
    ]


def group_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a distinct name of each parameter group: `matrices` or `vectors`, and a learning-rate factor but 1."""
    names: list[str] = []
    for group in optimizer.param_groups:
        kind = "vectors" if all(parameter.ndim < 2 for parameter in group["params"]) else "matrices"
        name = kind if group["lr_factor"] == 1 else f"{kind}_lr_{group['lr_factor']:g}"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _candidates(name: str) -> tuple[str, ...]:
    """Return patterns that may have been meant, for the suggestion in an error message."""
    module = _module(name)
    return name, module, f"*.{module.rpartition('.')[2]}", f"*.{'.'.join(name.split('.')[-2:])}"
