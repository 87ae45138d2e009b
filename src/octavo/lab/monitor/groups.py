"""Statistics of weights and gradients per parameter group of an optimizer, for `Monitor.step`.

groups = GroupStatistics(optimizer, every=10)
...
monitor.step(loss=loss, **groups.scalars())

Telemetry has every operand of an FP8 layer; this has all parameters, those in high precision too, as the optimizer
reads them: weights before its step, gradients as they are then, after clipping and unscaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from octavo.errors import ConfigError, UnsupportedError
from octavo.nn.fp8_weights import values
from octavo.optim import Optimizer as OctavoOptimizer
from octavo.tensor import is_distributed


class GroupStatistics:
    """Mean, variance and largest magnitude of the weights and gradients of each parameter group, on the device.

    They are measured in the optimizer's step. `detach` ends it; it is a context manager too.

    Args:
        optimizer: any of PyTorch's or Octavo's, that has the gradients when it steps.
        every: measures each step whose number this divides; the others cost nothing.
        names: of the groups, in order; by default `group["name"]`, or `group0`, `group1`, ...

    Raises:
        ConfigError: `every` is not positive, or the names are not as many as the groups, or not distinct.
        UnsupportedError: a parameter is sharded: its rank has a part of it alone.
    """

    def __init__(self, optimizer: Optimizer, every: int = 1, *, names: Sequence[str] = ()) -> None:
        if every < 1:
            raise ConfigError(f"GroupStatistics(every={every}): every must be a positive number of steps.")
        groups = optimizer.param_groups
        self.names = list(names) or [str(group.get("name", f"group{i}")) for i, group in enumerate(groups)]
        if len({*self.names}) < len(self.names) or len(self.names) != len(groups):
            raise ConfigError(
                f"GroupStatistics: {len(groups)} parameter groups need as many distinct names, got {self.names}."
            )
        if any(is_distributed(parameter) for group in groups for parameter in group["params"]):
            raise UnsupportedError("GroupStatistics: parameters are sharded over ranks; statistics are of whole ones.")
        self.every, self.done = every, 0
        """Number of steps made; a loop that resumes or goes back sets it."""
        self._found: dict[str, Tensor] = {}
        self._handle = optimizer.register_step_pre_hook(self._measure)

    def scalars(self) -> dict[str, Tensor]:
        """Return what the last step measured, once, under names such as `group0_gradient_variance`; empty if nothing.

        Values are FP32 of shape (), on the device; a group without gradients has those of its weights alone.
        """
        found, self._found = self._found, {}
        return found

    def detach(self) -> None:
        """Stop measuring."""
        self._handle.remove()

    @torch.no_grad()
    def _measure(self, optimizer: Optimizer, *_: Any) -> None:
        self.done += 1
        self._found = {}
        if self.done % self.every:
            return
        for name, group in zip(self.names, optimizer.param_groups, strict=False):  # groups that came later: unnamed
            for kind, tensors in (("weight", _weights(group)), ("gradient", _gradients(optimizer, group))):
                for stat, value in _statistics(tensors).items():
                    self._found[f"{name}_{kind}_{stat}"] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _weights(group: dict[str, Any]) -> Iterator[Tensor]:
    return (values(parameter.detach(), torch.float32) for parameter in group["params"])


def _gradients(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[Tensor]:
    own = optimizer.gradients(group["params"]) if isinstance(optimizer, OctavoOptimizer) else None
    gradients = own or (parameter.grad for parameter in group["params"])
    return (gradient.detach().float() for gradient in gradients if gradient is not None)


def _statistics(tensors: Iterator[Tensor]) -> dict[str, Tensor]:
    """Return mean, variance and largest magnitude of all elements; empty without any.

    Means and squared deviations of the tensors are joined, in FP64: a difference of squares would lose the variance.
    """
    parts = [
        (each.numel(), each.double().mean(), each.double().var(correction=0), each.abs().amax()) for each in tensors
    ]
    if not parts:
        return {}
    count = sum(size for size, *_ in parts)
    mean = torch.stack([size * own for size, own, _, _ in parts]).sum() / count
    squares = torch.stack([size * (spread + (own - mean) ** 2) for size, own, spread, _ in parts]).sum()
    largest = torch.stack([amax for *_, amax in parts]).amax()
    return {"mean": mean.float(), "variance": (squares / count).float(), "amax": largest}
