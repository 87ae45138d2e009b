"""A tensor on its way from the device to the host, waited for by nobody."""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """A copy into pinned memory, queued on the current stream. A tensor of the CPU is there already, and not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._here = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Return whether `result` need not wait."""
        return self._copied is None or self._copied.query()

    def result(self) -> Tensor:
        """Return the tensor on the CPU; waits for it where it has not arrived, and for no later work of the GPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
