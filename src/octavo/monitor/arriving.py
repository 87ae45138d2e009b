"""Numbers of a step on their way from the device, without anybody waiting for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.download import Download


class Arriving:
    """The scalars of one step, on their way from the GPU: gathered there, copied in one piece, waited for by nobody.

    Args:
        step: that measured them.
        scalars: numbers, or tensors of one element on any device, all CUDA ones on the same.

    Raises:
        ConfigError: a tensor has more than one element.
    """

    def __init__(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        self.step = step
        for key, value in scalars.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(f"monitor.step: '{key}' has {value.numel()} elements; give its mean, say.")
        plain = {key: value.detach() if isinstance(value, Tensor) else value for key, value in scalars.items()}
        coming = {key: value for key, value in plain.items() if isinstance(value, Tensor) and value.is_cuda}
        self._known = {key: float(value) for key, value in plain.items() if key not in coming}
        self._keys = list(coming)
        scalar = [value.reshape(()).float() for value in coming.values()]
        self._coming = Download(torch.stack(scalar) if scalar else torch.empty(0))

    def has_arrived(self) -> bool:
        """Return whether `read` need not wait."""
        return self._coming.has_arrived()

    def read(self) -> dict[str, float]:
        """Return the numbers; waits for those that have not arrived, and for no later work of the GPU."""
        return {**self._known, **dict(zip(self._keys, self._coming.result().tolist(), strict=True))}
