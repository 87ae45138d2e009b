"""Measurements of a step on their way from the device: scalars, and telemetry of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.kernels.runtime.transfers import AsyncHostCopy
from octavo.nn.telemetry import Telemetry


class AsyncScalars:
    """Scalars of one step, gathered on the GPU and copied to the host asynchronously in one piece.

    Args:
        step: step that measured them.
        scalars: numbers, or tensors of one element on any device; CUDA tensors on the same device.

    Raises:
        ConfigError: a tensor has more than one element.
    """

    def __init__(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        self.step = step
        for key, value in scalars.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"monitor.step: '{key}' has {value.numel()} elements, not 1; pass its mean, for example."
                )
        plain = {key: value.detach() if isinstance(value, Tensor) else value for key, value in scalars.items()}
        on_gpu = {key: value for key, value in plain.items() if isinstance(value, Tensor) and value.is_cuda}
        self._known = {key: float(value) for key, value in plain.items() if key not in on_gpu}
        self._keys = list(on_gpu)
        scalar = [value.reshape(()).float() for value in on_gpu.values()]
        self._copy = AsyncHostCopy(torch.stack(scalar) if scalar else torch.empty(0, dtype=torch.float32))

    def has_arrived(self) -> bool:
        """Return True if `read` would not wait."""
        return self._copy.has_arrived()

    def read(self) -> dict[str, float]:
        """Return the numbers. Waits for pending copies, but not for later work of the GPU."""
        return {**self._known, **dict(zip(self._keys, self._copy.result().tolist(), strict=True))}


def telemetry_of(
    model: nn.Module, every: int = 1, histograms_every: int = 0, *, together: bool = False, order: Sequence[str] = ()
) -> Telemetry | None:
    """Return the telemetry of a model's FP8 layers, or None without any; arguments as of `Telemetry`.

    Args:
        together: merge values over all ranks, all of which must call this.
        order: names of all layers of the model, if ranks have different ones.
    """
    group = dist.new_group() if together else None
    source = Telemetry(model, every, histograms_every=histograms_every, group=group, order=order)
    return source if source.rows else None
