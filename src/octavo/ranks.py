"""Which of several processes that train together this one is. PyTorch is loaded when that is asked, not before."""

from __future__ import annotations

import os


def in_process_group() -> bool:
    """Return whether there are ranks to speak to: `torch.distributed.init_process_group` was called."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Return whether this is the process that writes and prints for all; so is one that trains alone.

    Where there is no process group, not yet or not any more, the environment says it, as `torchrun` has set it.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if in_process_group() else int(os.environ.get("RANK", "0"))
    return rank == 0
