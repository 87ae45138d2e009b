"""Numbers of a step on their way from the device, without anybody waiting for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import ConfigError


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
        self._copied: torch.cuda.Event | None = None
        if coming:
            gathered = torch.stack([value.reshape(()).float() for value in coming.values()])
            self._host = torch.empty(len(coming), dtype=torch.float32, pin_memory=True)
            self._host.copy_(gathered, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(gathered.device))

    def has_arrived(self) -> bool:
        """Return whether `read` need not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> dict[str, float]:
        """Return the numbers; waits for those that have not arrived, and for no later work of the GPU."""
        if self._copied is None:
            return self._known
        self._copied.synchronize()
        return {**self._known, **dict(zip(self._keys, self._host.tolist(), strict=True))}
