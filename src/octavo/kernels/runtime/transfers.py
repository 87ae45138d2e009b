"""Asynchronous copies between host and device: batches and tables to the device, scalars to the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from octavo.errors import UnsupportedError


class AsyncHostCopy:
    """Copy into pinned memory, enqueued on the current stream; a CPU tensor is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def has_arrived(self) -> bool:
        """Return whether `result` would not block."""
        return self._event is None or self._event.query()

    def result(self) -> Tensor:
        """Return the tensor on the CPU; blocks until the copy is complete, but not on later GPU work."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously.

    Through pinned memory: from pageable memory, the host would block on all preceding GPU work.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)


class PinnedStaging:
    """Cache of tables on the device by name, uploaded when their key changes.

    Uploads do not synchronise with the device; those captured by a CUDA graph stay valid for every replay.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, tuple[Hashable, Tensor]] = {}
        self._spare: dict[Hashable, Tensor] = {}
        self._captured: list[Tensor] = []
        """Buffers that graphs read at every replay, kept alive."""

    def __call__(self, name: Hashable, key: Hashable, make: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Return the table `name` on the device; `make` is called only if `key` changed since the last call.

        Raises:
            UnsupportedError: during a graph capture without an earlier step of the same shape.
        """
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        known = self._tables.get(name)
        if known is not None and known[0] == key and known[1].device == device:
            if captures:
                self._captured.append(known[1])
            return known[1]
        if captures:
            return self._capture(name, make(), device)  # filled at replay, so not cached for other steps
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
                "memory cannot be pinned during a CUDA graph capture: make a step with the same parameters before the "
                "capture."
            )
        self._captured.append(spare.copy_(table))
        self._tables.pop(name, None)  # makes the next step pin memory for another capture
        return spare.to(device, non_blocking=True)
