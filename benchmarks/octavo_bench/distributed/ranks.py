"""The ranks of a bench: those of `torchrun`, on GPUs where there are any; or one of many, alone."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from octavo_bench.distributed.alone import join_alone

TIMEOUT = datetime.timedelta(minutes=5)
"""After which a rank no longer waits for another."""


def under_torchrun() -> bool:
    """Return whether this process is one of several ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def process_group(alone_of: int | None = None) -> Iterator[torch.device]:
    """Have `torchrun`'s ranks talk to each other inside a block, and yield the device of this one.

    Args:
        alone_of: be one of that many instead, without the others.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if alone_of is not None:
        join_alone(alone_of)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def any_rank(device: torch.device, value: bool) -> bool:
    """Return whether it is true of any rank: all decide alike."""
    known = torch.tensor(float(value), device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return bool(known.item())
