"""The ranks of torchrun: whether there are any, and their process group."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=5)
"""Longest wait of a rank for another."""


def under_torchrun() -> bool:
    """Return whether this process is one of several ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Connect `torchrun`'s ranks within the context, and yield the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield device
    dist.barrier()
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are in a collective


def any_rank(device: torch.device, value: bool) -> bool:
    """Return whether the value is true on any rank; the result is equal on all."""
    known = torch.tensor(float(value), device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return bool(known.item())
