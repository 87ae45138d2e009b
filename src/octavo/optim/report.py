"""What an optimizer takes: the bytes of its tensors, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octavo.optim.gradients import Gradients
from octavo.tensor import FP8Tensor, local

if TYPE_CHECKING:
    from octavo.optim.optimizer import Optimizer

KINDS = {"remainder": "master", "master": "master", "exp_avg": "first", "exp_avg_sq": "second"}
"""Of the tensors of a parameter's state."""


def bytes_by_kind(optimizer: Optimizer, gradients: Gradients) -> dict[str, float]:
    """See `Optimizer.report`.

    Args:
        gradients: those that are stored in FP8.
    """
    taken = dict.fromkeys(("weight", "gradient", "master", "first", "second"), 0)
    count = 0
    for entry in optimizer.entries():
        parameter = entry.parameter
        count += local(parameter).numel()
        weight = local(parameter)
        held = (weight.codes, weight.scale) if isinstance(weight, FP8Tensor) else (weight,)
        taken["weight"] += sum(map(_bytes, held))
        taken["gradient"] += sum(map(_bytes, gradients.get(entry.number) or ()))
        taken["gradient"] += 0 if parameter.grad is None else _bytes(local(parameter.grad))
        for name, tensor in optimizer.state.get(parameter, {}).items():
            if name != "step":
                taken[KINDS[name.removesuffix("_scale")]] += _bytes(tensor)
    return {kind: size / count for kind, size in taken.items()} | {"total": sum(taken.values()) / count}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
