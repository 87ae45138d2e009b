"""Settings of an optimizer and its groups: validation, and the table that a step reads on the device."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.coefficients import HYPER
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.optim.states import DEFAULT, States, keep_small

GRADIENTS = ("wide", "fp8")
"""Storage of gradients, see `OptimizerOptions.gradients`."""
Keep = Callable[[str, Tensor], str | States | None]
"""(name, parameter) -> the tier of a parameter that overrides its group's, or None."""
_OF_RULES = ("betas", "eps", "momentum", "dampening", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Settings of a group with which some rules compute something else."""
_ON_DEVICE = math.nan
"""Learning rate of a group before its tensor is read. No number: the table of one would count as already uploaded."""
_MISSING = "octavo.optim does not implement it. Leave it out."
_FUSED = "Every step of octavo.optim is fused, by one kernel for all parameters. Leave it out."
_PYTORCHS = {
    "amsgrad": _MISSING,
    "differentiable": _MISSING,
    "foreach": _FUSED,
    "fused": _FUSED,
    "capturable": "Every step of octavo.optim can be captured, with lr as a tensor on the GPU. Leave it out.",
    "maximize": "Set the key 'maximize' of a parameter group.",
    "decoupled_weight_decay": "Adam adds weight decay to the gradient, the others decouple it: choose by name.",
}
"""Unsupported options of PyTorch, each with its replacement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions:
    """Keyword arguments shared by all optimizers.

    Raises:
        ConfigError: an unknown rounding, a limit out of range, or `release` with a global `clip`.
    """

    states: str | States = DEFAULT
    """Storage tier, see `octavo.optim.TIERS`. A parameter group may have its own, with the key `states`."""
    keep: Keep = keep_small
    """Chooses another tier for single parameters, in groups without their own `states`. It receives names where
    `model.named_parameters()` is passed, and numbers otherwise."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of stored states. With `nearest`, a second moment of few bits no longer follows small changes."""
    seed: int = 0
    """Seed of stochastic rounding."""
    clip: float | None = None
    """Largest global norm of the gradient; a group may have its own limit, with the key `clip`."""
    skip_nonfinite: bool = True
    """Skip a step whose gradients are not all finite, at the cost of reading all gradients once. The first is warned
    of; `Optimizer.skipped` counts them."""
    max_skips: int | None = None
    """Raise `NonFiniteError` after so many skipped steps in a row. None: never. Nothing waits for a GPU, which may be
    some steps behind."""
    max_update: float | None = None
    """Bound of |update|, in learning rates, where a moment is not FP32: one that was rounded badly could exceed what
    exact ones reach. None: `largest_update`."""
    release: bool = False
    """Step each parameter as soon as backward has its gradient, and free the gradient. `step` then steps the rest, and
    counts. A `GradScaler` is refused, and `DistributedDataParallel` needs `accumulating`: both come after the step."""
    gradients: Literal["wide", "fp8"] = "wide"
    """`wide`: the dtype in which backward computes them. `fp8`: each gradient is stored as E4M3 codes with the scales
    of the tier as soon as it is complete, and `grad` is None again. Clipping and overflow detection read the codes.
    Parameters for which `keep` names a tier stay wide. A group may have its own, with the key `gradients`. Code that
    reads `grad` sees no such gradient: clip by `clip`, not by `clip_grad_norm_`; a `GradScaler` is refused; and
    `DistributedDataParallel`, which reduces after the gradient is there, needs `accumulating`."""

    def __post_init__(self) -> None:
        if self.rounding not in ("stochastic", "nearest"):
            near = did_you_mean(self.rounding, ("stochastic", "nearest"))
            raise ConfigError(f"optimizer rounding: '{self.rounding}' is neither stochastic nor nearest.{near}")
        if self.release and self.clip is not None:
            raise ConfigError(
                "optimizer: release=True steps a parameter before the others have gradients, so the global norm that"
                " clip needs is not known. Give groups limits of one parameter each, or take release=False."
            )
        _check_clip(self.clip)
        if self.max_skips is not None and not self.max_skips >= 1:
            raise ConfigError(f"optimizer max_skips: {self.max_skips} is not at least 1. None never raises.")


def _check_clip(value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"optimizer clip: {value} is not a positive number. None leaves gradients as they are.")


def check_settings(settings: Mapping[str, Any], others: Iterable[str]) -> None:
    """Check that keyword arguments are fields of `OptimizerOptions`.

    Args:
        others: other arguments of the optimizer, to suggest.

    Raises:
        ConfigError: one is unknown.
    """
    own = [field.name for field in fields(OptimizerOptions)]
    for name in settings:
        if name not in own:
            known = (*others, *own)
            hint = _PYTORCHS.get(name) or did_you_mean(name, known).strip() or f"Settings: {', '.join(known)}."
            raise ConfigError(f"optimizer: there is no setting '{name}'. {hint}")


def check_group(group: Mapping[str, Any], rule: str, known: Collection[str]) -> None:
    """Check the settings of a parameter group of an optimizer with this rule.

    Args:
        known: settings that the group may have. Others, as schedulers and the user's own code add, are ignored.

    Raises:
        ConfigError: one is misspelt, out of range, valid for the whole optimizer or another rule only, or an option of
            PyTorch's that Octavo does not implement.
    """
    of_all = {field.name for field in fields(OptimizerOptions)} - {"states", "clip", "gradients"}
    for name in group:
        if name in of_all or (name == "rule" and rule != "muon"):
            raise ConfigError(f"optimizer: '{name}' applies to all parameters and cannot be set per group.")
        if name in ("amsgrad", "differentiable") and group[name]:
            raise ConfigError(f"optimizer {name}: octavo.optim does not implement it. Remove it from the group.")
        if name not in known:
            _check_unknown(name, group.get("rule", rule), known)
    is_decoupled = group.get("rule", rule) != "adam"
    if group["weight_decay"] and group.get("decoupled_weight_decay", is_decoupled) != is_decoupled:
        raise ConfigError(f"optimizer decoupled_weight_decay: {_PYTORCHS['decoupled_weight_decay']}")
    if group["gradients"] not in GRADIENTS:
        near = did_you_mean(group["gradients"], GRADIENTS)
        raise ConfigError(f"optimizer gradients: '{group['gradients']}' is none of {', '.join(GRADIENTS)}.{near}")
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
    _check_clip(group["clip"])


def _check_unknown(name: str, rule: str, known: Collection[str]) -> None:
    """Refuse a key of a group that was probably meant as a setting. `lr` has `max_lr` beside it: lengths are compared.

    Raises:
        ConfigError: it is one of another rule, or a misspelling.
    """
    if name in _OF_RULES:
        raise ConfigError(f"optimizer {name}: a setting of a group that the rule '{rule}' does not have. Remove it.")
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    if near and abs(len(near[0]) - len(name)) < 3:
        raise ConfigError(f"optimizer: there is no setting '{name}' of a group. Did you mean '{near[0]}'?")


def group_table(
    groups: Sequence[dict[str, Any]], clip: float | None, uploads: PinnedStaging, device: torch.device
) -> Tensor:
    """Return the settings of each group, FP64 (G, len(HYPER)). A learning rate that is a tensor is read on the device.

    Args:
        clip: largest norm of the gradients of all groups.
    """
    rows = tuple(
        (
            _ON_DEVICE if isinstance(group["lr"], Tensor) else float(group["lr"]),
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


def largest_update(betas: tuple[float, float] | None) -> float:
    """Return the bound of |update|, in learning rates: 10, or what exact moments may reach where betas allow more.

    m is a sum of c_i g_i and v one of d_i g_i^2, with c_i = (1 - beta1) beta1^i and d_i = (1 - beta2) beta2^i. By
    Cauchy and Schwarz |m| / sqrt(v) <= sqrt(sum of c_i^2 / d_i), whatever the gradients are.
    """
    if betas is None:
        return 10.0
    beta1, beta2 = betas
    ratio = beta1**2 / beta2 if beta2 else math.inf
    return max(10.0, (1 - beta1) / math.sqrt((1 - beta2) * (1 - ratio))) if ratio < 1 and beta2 < 1 else math.inf
