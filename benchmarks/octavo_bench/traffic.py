"""Counters of bytes sent by PyTorch's own collectives, so that any library is measured alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
}


class Traffic(TorchDispatchMode):
    """Counts the collectives of a block of code: `with Traffic() as traffic: ...`.

    Attributes:
        calls: number of collectives by kind.
        bytes: bytes by kind, of the largest tensor of each call: the output of an all-gather, the input of a
            reduce-scatter, the operand of an all-reduce. Over n ranks each rank receives, or sends, (n - 1) / n of it
            in a gather or scatter, and twice that in a ring all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func._schema.name.removeprefix("c10d::")) if func.namespace == "c10d" else None
        if kind is not None:
            # Lists of received, then of sent tensors; or single tensors.
            parts = [[t for t in tree_leaves(a) if type(t) is torch.Tensor] for a in args]
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.bytes[kind] = self.bytes.get(kind, 0) + max(sum(t.nbytes for t in part) for part in parts)
        return func(*args, **(kwargs or {}))
