"""The ranks of distributed training: which one this process is, and what one does for all.

PyTorch is imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.errors import OctavoError, RunError

T = TypeVar("T")


def in_process_group() -> bool:
    """Return True if `torch.distributed.init_process_group` was called."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Return True on rank 0, which writes and prints for all ranks, and in a single process.

    Without a process group, before its creation or after its end, the rank is `RANK`, set by `torchrun`.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if in_process_group() else int(os.environ.get("RANK", "0"))
    return rank == 0


def gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks, on each of them; without a process group that of this one. All ranks call it.

    `group` is another process group of all ranks, for a thread whose messages must not mix with those of others.
    """
    if not in_process_group():
        return [value]
    import torch.distributed as dist

    found: list[Any] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value, group)
    return found


def together(action: Callable[[], T], group: Any = None) -> T:
    """Return `action()` of this rank. If it raises on any rank, it raises on all: none waits for one that has failed.

    All ranks call it. The action must not communicate. `group` is as for `gather`.

    Raises:
        Exception: the one raised on this rank, else that of the first rank that failed: the same if it is Octavo's or
            the system's, RunError for any other.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    failures = gather(_sent(error), group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            failure.add_note(f"Raised on rank {rank}.")
            raise failure
    return result


def on_first_rank(action: Callable[[], T], group: Any = None) -> T | None:
    """Return `action()` of the first rank, on all ranks; all raise its error, see `together`. All ranks call it.

    Without a process group other ranks, by `RANK`, get None.
    """
    return gather(together(action, group) if is_first_rank() else together(lambda: None, group), group)[0]


def _sent(error: Exception | None) -> Exception | None:
    """Return the error in the form sent to other ranks: exceptions of other libraries may not pickle."""
    if error is None or isinstance(error, OctavoError | OSError):
        return error
    return RunError(f"{type(error).__name__}: {error}")
