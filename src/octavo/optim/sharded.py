"""Optimizer support for sharded parameters (DTensors of FSDP2 and tensor parallel).

A rank steps its own shard, and keeps its state in plain tensors. The parts that involve all ranks are here: sums of
squares, random streams, and for checkpoints states as DTensors sharded like their parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.kernels.storage import GROUP, groups_of
from octavo.tensor import is_distributed, local
from octavo.tensor.local import dtensor_like

if TYPE_CHECKING:
    from octavo.optim.optimizer import Entry, Optimizer

SHARDS = 1 << 10
"""Largest number of shards of a parameter, each with its own random stream."""
_SENT = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
"""Dtypes that every collective supports."""


def stream_of(number: int, parameter: Tensor) -> int:
    """Return the random stream for rounding this rank's shard of a parameter.

    Different shards have different streams; replicas of a shard have the same one.
    """
    part = 0
    if is_distributed(parameter):
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        for dim in _sharded_dims(parameter):
            part = part * mesh.size(dim) + coordinate[dim]
    if part >= SHARDS:
        raise UnsupportedError(f"optimizer: a parameter in more than {SHARDS} shards: shard over fewer ranks (HSDP).")
    return number * SHARDS + part if part else number


def sum_over_ranks(sums: Tensor, parameters: Sequence[Tensor], uploads: PinnedStaging, name: Any) -> Tensor:
    """Return the sums (P,) over whole parameters, from the sums over this rank's shards."""
    groups: dict[tuple[Any, ...], set[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_distributed(parameter):
            for dim in _sharded_dims(parameter):
                groups.setdefault((parameter.device_mesh, dim), set()).add(index)  # type: ignore[attr-defined]
    for (mesh, dim), members in groups.items():
        sharded = tuple(index in members for index in range(len(parameters)))
        mask = uploads(("sharded", name, dim), sharded, partial(torch.tensor, sharded), sums.device)
        total = torch.where(mask, sums, 0.0)
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
        sums = torch.where(mask, total, sums)
    return sums


def spread(name: str, tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a state tensor of this rank as a DTensor over all ranks; `unspread` is the inverse.

    A tensor with the shape of the parameter, or with scales along its rows, is sharded like the parameter, so that a
    different number of ranks along the rows can read a checkpoint. Scales of a whole shard form a grid: one row per
    shard of the rows, with columns per shard of the columns. Codes and remainders are stored as bytes: collectives
    support neither int16 nor uneven float8.
    """
    if name == "step" or not is_distributed(parameter):
        return tensor
    if tensor.shape == local(parameter).shape:
        if tensor.dtype in _SENT:
            return dtensor_like(parameter, tensor, parameter.shape)
        shape = (*parameter.shape[:-1], parameter.shape[-1] * tensor.element_size())
        return dtensor_like(parameter, tensor.view(torch.uint8), shape)
    if _lies_along_rows(tensor, parameter):
        rows = local(parameter).shape[0]
        return along_rows(tensor.reshape(-1, tensor.numel() // rows if rows else tensor.shape[1]), parameter)
    parts = _ranks_along(0, parameter)
    width = max(tensor.numel(), 1 if parameter.dim() > 1 else groups_of(-(-parameter.shape[0] // parts)))
    row = F.pad(tensor.reshape(1, -1), (0, width - tensor.numel()))
    return dtensor_like(parameter, row, (parts, width * _ranks_along(1, parameter)))


def along_rows(part: Tensor, parameter: Tensor) -> Tensor:
    """Return per-row data of this rank's shard of a matrix, codes or scales (r, c), as a DTensor over all ranks.

    Where columns are sharded, each rank has its own scales of a row, which are placed side by side.
    """
    return dtensor_like(parameter, part, (parameter.shape[0], part.shape[1] * _ranks_along(1, parameter)))


def unspread(saved: Mapping[str, Any], optimizer: Optimizer, entry: Entry) -> Mapping[str, Any]:
    """Return a saved state in the form that this rank stores."""
    if not is_distributed(entry.parameter):
        return saved
    here, fresh = {}, optimizer.fresh(entry)
    for name, value in saved.items():
        here[name] = value
        if isinstance(value, Tensor) and is_distributed(value):
            part, wanted = local(value), fresh.get(name)
            if wanted is not None and part.dtype != wanted.dtype and part.dtype == torch.uint8:
                part = part.view(wanted.dtype)
            if wanted is not None and part.shape != wanted.shape and part.numel() >= wanted.numel():
                part = part.reshape(-1)[: wanted.numel()].reshape(wanted.shape)
            here[name] = part
    return here


def _sharded_dims(parameter: Tensor) -> list[int]:
    """Return the mesh dimensions over which a DTensor is sharded."""
    # Not `is_shard`: it is false for the strided shards of FSDP2 over tensor parallel.
    return [dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()]  # type: ignore[attr-defined]


def _lies_along_rows(scales: Tensor, parameter: Tensor) -> bool:
    """Return whether scales belong to rows, or to parts of rows sharded as evenly as the parameter."""
    if parameter.dim() < 2 or scales.dim() != 2:
        return False
    part, placements = local(parameter), parameter.placements  # type: ignore[attr-defined]
    if scales.numel() == 1 and not 0 < part.numel() <= GROUP:
        return False  # one scale for the whole shard, however few rows it has
    axes = {placements[dim].dim for dim in _sharded_dims(parameter)}
    across = _ranks_along(1, parameter)
    even = axes <= {0} or (axes <= {0, 1} and parameter.dim() == 2 and parameter.shape[1] % across == 0)
    rows = part.shape[0]
    return even and (scales.shape[0] % rows == 0 if rows else True)


def _ranks_along(axis: int, parameter: Tensor) -> int:
    """Return the number of ranks over which one dimension of a DTensor is sharded."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return prod(mesh.size(dim) for dim in _sharded_dims(parameter) if placements[dim].dim == axis)
