"""Copies between host and device that wait for nothing: batches and tables to the device, scalars to the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from octavo.errors import UnsupportedError


class AsyncHostCopy:
    """A copy into pinned memory, queued on the current stream; a CPU tensor is not copied."""

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


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device.

    From memory that is not pinned the host would wait for all that the GPU was given before.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


class PinnedStaging:
    """Tables by name, kept on the device for as long as they say the same.

    No upload waits for the device, and one that a CUDA graph captures is good for every replay.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, tuple[Hashable, Tensor]] = {}
        self._spare: dict[Hashable, Tensor] = {}
        self._captured: list[Tensor] = []
        """What graphs read whenever they are replayed: it must not be freed."""

    def __call__(self, name: Hashable, key: Hashable, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table `name` on the device; `make` is called only where `key` is another than last time.

        Raises:
            UnsupportedError: a graph is being captured, and there was no step like this one before it.
        """
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        known = self._tables.get(name)
        if known is not None and known[0] == key and known[1].device == device:
            if captures:
                self._captured.append(known[1])
            return known[1]
        if captures:
            return self._capture(name, make(), device)  # filled when it is replayed, so no table for other steps
        table = make()
        if device.type == "cuda":
            table = self._move(name, table, device)
        self._tables[name] = key, table
        return table

    def _move(self, name: Hashable, table: Tensor, device: torch.device) -> Tensor:
        spare = self._spare.get(name)
        if spare is None or spare.shape != table.shape:
            self._spare[name] = torch.empty_like(table, pin_memory=True)
        return upload(table, device)

    def _capture(self, name: Hashable, table: Tensor, device: torch.device) -> Tensor:
        spare = self._spare.pop(name, None)
        if spare is None or spare.shape != table.shape or spare.dtype != table.dtype:
            raise UnsupportedError(
                "a CUDA graph is being captured, and memory cannot be pinned now: make a step with the same "
                "parameters before the capture."
            )
        self._captured.append(spare.copy_(table))
        self._tables.pop(name, None)  # so that the next step pins memory for another capture
        return spare.to(device, non_blocking=True)
