"""`AdamW`, `Adam` and `Lion`: PyTorch's arguments, and those of `Optimizer`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.optim.optimizer import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2).

    Args:
        params: parameters, `model.named_parameters()`, or parameter groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the first and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        settings: fields of `octavo.optim.settings.OptimizerOptions`.
    """

    rule = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **settings: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **settings)


class Adam(Optimizer):
    """Adam (arXiv 1412.6980, algorithm 1); weight decay is added to the gradient. Arguments as for `AdamW`."""

    rule = "adam"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **settings)


class Lion(Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum; no second moment.

    Args:
        params: as for `AdamW`.
        lr: learning rate; 3 to 10 times smaller than Adam's.
        betas: decay of the interpolation, and of the stored momentum.
        weight_decay: decoupled; 3 to 10 times larger than Adam's.
        settings: fields of `octavo.optim.settings.OptimizerOptions`.
    """

    rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **settings)
