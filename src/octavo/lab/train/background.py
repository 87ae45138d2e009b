"""Checkpoints written beside training: a step waits for a copy in host memory, and a thread writes that.

The thread runs `checkpoint.save`, with its own process group, so that a checkpoint is as whole and as checked as one
that the step waits for: hidden until it is flushed, indexed by checksums, renamed; only then are older ones removed. It
dies with the process and leaves what a killed process leaves.

At most one write is in flight. Its end is an agreement of all ranks, which ask each other in every step meanwhile, so
that all go on, or all raise the error.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.lab.train import checkpoint
from octavo.lab.train.parallel import Ranks
from octavo.tensor import is_distributed, local


class Written(NamedTuple):
    """A checkpoint that was written."""

    step: int
    path: Path


class BackgroundWriter:
    """Writes the checkpoints of a run in a thread. All ranks create one, and call its methods in the same steps.

    It keeps the memory of the copy, as much as a checkpoint on this rank, from one checkpoint to the next.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        group = dist.new_group(backend="gloo") if ranks.count > 1 else None
        self._own = replace(ranks, group=group)  # its messages must not mix with those of training
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._write: _Write | None = None

    def save(
        self,
        directory: Path,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        keep: int,
    ) -> None:
        """Copy, and write as `checkpoint.save` does. None may be in flight: call `wait` first."""
        if self._write is not None:
            raise RuntimeError(f"a checkpoint of step {self._write.step} is still being written.")
        self._copies = {
            name: {key: _copied(tensor, self._copies.get(name, {}).get(key)) for key, tensor in named.items()}
            for name, named in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        plain = json.loads(json.dumps(state))  # training goes on to change its lists
        arguments = directory, step, self._copies, plain
        self._write = _Write(step, partial(checkpoint.save, *arguments, keep=keep, ranks=self._own))

    def ended(self) -> Written | None:
        """Return the checkpoint in flight if all ranks have written it, without waiting; all ranks call it.

        Raises:
            CheckpointError: see `checkpoint.save`.
        """
        if self._write is None or not all(self._ranks.gather(not self._write.is_alive())):
            return None
        return self.wait()

    def wait(self) -> Written | None:
        """Return the checkpoint in flight once it is written, None if there is none; errors as of `ended`."""
        if self._write is None:
            return None
        write, self._write = self._write, None
        return write.result()

    def close(self, seconds: float) -> None:
        """Wait for a checkpoint in flight, for at most so many seconds and whether it fails or not."""
        if self._write is not None:
            self._write.join(seconds)
            self._write = None


class _Write(threading.Thread):
    """One call of `checkpoint.save`."""

    def __init__(self, step: int, save: Callable[[], Path]) -> None:
        super().__init__(name="octavo-checkpoint", daemon=True)
        self.step, self._save = step, save
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._path = self._save()
        except BaseException as error:
            self._error = error

    def result(self) -> Written:
        """Wait, and return what was written or raise the error."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None, "a thread that ended has a result"
        return Written(self.step, self._path)


def _copied(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Return a copy in host memory, in that of an earlier one if it fits; from a GPU, complete once synchronised.

    A DTensor stays one, on the mesh that it has.
    """
    source = tensor.detach()
    if before is None or (before.shape, before.dtype) != (source.shape, source.dtype):
        return _host_copy(source)
    if local(before).shape != local(source).shape or is_distributed(before) != is_distributed(source):
        return _host_copy(source)
    local(before).copy_(local(source), non_blocking=True)
    return before


def _host_copy(source: Tensor) -> Tensor:
    if is_distributed(source) or not source.is_cuda:
        return source.to("cpu", copy=True)
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
