"""The rank of this process in distributed training. PyTorch is imported on first use."""

from __future__ import annotations

import os


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
