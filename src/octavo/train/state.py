"""A lane's state as named tensors, and back. It is all that a lane needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.nn.scales import scales
from octavo.optim import Optimizer
from octavo.optim.sharded import along_rows, spread
from octavo.tensor import FP8Tensor, is_distributed, local
from octavo.train.lane import Lane

_MODEL, _OPTIMIZER, _LOSS_SCALE, _REDUCTION = "model.", "optimizer.", "loss_scale.", "reduction."
SCALES = "scales."
"""What the names of scales begin with that are kept from step to step."""


def lane_tensors(lane: Lane) -> dict[str, Tensor]:
    """Return the parameters, persistent buffers, AdamW state and loss scale of `lane` by name, a tied weight once.

    What is sharded over ranks is so here, as DTensors of plain tensors in the memory that is trained.
    """
    tensors = {_MODEL + name: tensor for name, tensor in _weights(lane).items()}
    for name, parameter in lane.parameters.items():
        for key, value in lane.optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value if is_distributed(value) else spread(key, value, parameter)
    tensors |= {_LOSS_SCALE + key: tensor for key, tensor in lane.loss_scale.state_dict().items()}
    if lane.reduction is not None:
        tensors |= {_REDUCTION + key: tensor for key, tensor in lane.reduction.state_dict().items()}
    book = scales(lane.model)
    return tensors | ({} if book is None else {SCALES + name: tensor for name, tensor in book.state_dict().items()})


def restore_lane(lane: Lane, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy what `lane_tensors` returned into `lane`. Nothing is copied unless everything fits.

    The tensors may be whole, also where those of the lane are sharded: each rank then takes its part.

    Raises:
        CheckpointError: a parameter, or a scale that is kept from step to step, is missing, unknown or of another
            shape: it is of another model. Or the optimizer's states are of another tier.
    """
    weights, saved = _weights(lane), _below(_MODEL, tensors)
    _check_same_model(weights, saved, where)
    states = dict(_states_here(lane, tensors, where))
    if (book := scales(lane.model)) is not None:
        book.load_state_dict(_below(SCALES, tensors))
    with torch.no_grad():
        for name, tensor in weights.items():
            local(tensor).copy_(local(_part(saved[name], tensor)))
    for name, state in states.items():
        lane.optimizer.state.pop(lane.parameters[name], None)  # before the first step there was none
        if state:
            copied = {key: tensor.to(lane.device, copy=True) for key, tensor in state.items()}
            lane.optimizer.state[lane.parameters[name]] = copied
    lane.loss_scale.load_state_dict(_below(_LOSS_SCALE, tensors))
    if lane.reduction is not None:
        lane.reduction.load_state_dict(_below(_REDUCTION, tensors))


def place(lane: Lane, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory to read a tensor of `lane_tensors` into, sharded where its parameter is."""
    own = name.partition(".")[2]
    parameter = lane.parameters.get(own, lane.parameters.get(own.rpartition(".")[0]))
    if parameter is None or not is_distributed(parameter):
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import empty

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _weights(lane: Lane) -> dict[str, Tensor]:
    persistent = lane.model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in lane.model.named_buffers() if name in persistent}
    named = {**lane.parameters, **buffers}
    return dict(part for name in sorted(named) for part in _stored(name, named[name]))


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a weight consists of: itself, or codes and scales."""
    own = local(tensor)
    parts = {f"{name}.{part}": plain for part, plain in own.to_tensors().items()} if isinstance(own, FP8Tensor) else {}
    for full_name, part in (parts or {name: own}).items():
        yield full_name, _of_all_ranks(part.detach(), tensor) if is_distributed(tensor) else part


def _of_all_ranks(part: Tensor, parameter: Any) -> Tensor:
    """Return as a DTensor what this rank has of a parameter, or of the codes or scales of its rows."""
    if part.shape != local(parameter).shape:
        return along_rows(part, parameter)
    from torch.distributed.tensor import DTensor

    shape, mesh, placements = parameter.shape, parameter.device_mesh, parameter.placements
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _part(saved: Tensor, like: Any) -> Tensor:
    """Return a saved tensor cut for the ranks as `like` is; as it is where it is cut already, or `like` is whole."""
    if is_distributed(saved) or not is_distributed(like):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _states_here(lane: Lane, tensors: Mapping[str, Tensor], where: Path) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each trained parameter's name, and its saved state as this rank keeps it."""
    for name, kept in _kept(lane):
        parameter, saved = lane.parameters[name], _below(f"{_OPTIMIZER}{name}.", tensors)
        state = {key: _kept_part(key, saved[key], kept[key], parameter) if key in kept else saved[key] for key in saved}
        here, there = _tensor_types(kept), _tensor_types(state)
        if there and here != there:
            why = "of another tier than this run's (--states)"
            if _dtypes(here) == _dtypes(there):
                why = "parts for another number of ranks (parallel.shard), and a scale is of a part"
            raise CheckpointError(
                f"{where}: the optimizer's states of '{name}' are {why}: saved are {_told(there)}; kept are"
                f" {_told(here)}."
            )
        yield name, state


def _kept_part(key: str, saved: Tensor, kept: Tensor, parameter: Tensor) -> Tensor:
    """Return what this rank keeps of a saved tensor of a parameter's state, like `kept` where that is possible."""
    if is_distributed(kept):  # an optimizer of PyTorch keeps DTensors
        return _part(saved, kept)
    spread_out = spread(key, kept, parameter)  # as `lane_tensors` has it
    return _shaped(local(_part(_shaped(saved, spread_out), spread_out)), kept)


def _shaped(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the same bytes in the dtype and shape of another tensor; as it is where these are not as many."""
    if is_distributed(tensor) or (tensor.shape, tensor.dtype) == (like.shape, like.dtype):
        return tensor
    if torch.uint8 in (tensor.dtype, like.dtype) and tensor.dtype != like.dtype and tensor.dim():
        tensor = tensor.contiguous().view(like.dtype)
    return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor


def _check_same_model(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: Path) -> None:
    of_another = f"{where}: this is the checkpoint of another model:"
    for name in weights.keys() ^ saved.keys():
        place = "the model" if name in weights else "the checkpoint"
        raise CheckpointError(f"{of_another} only {place} has the parameter '{name}'.")
    for name, tensor in weights.items():
        here, there = list(tensor.shape), list(saved[name].shape)
        if here != there:
            raise CheckpointError(f"{of_another} '{name}' has the shape {there} there and {here} here.")


def _kept(lane: Lane) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each trained parameter's name, and tensors of the shapes and dtypes that the optimizer keeps of it."""
    if isinstance(lane.optimizer, Optimizer):
        for entry in lane.optimizer.entries():
            yield entry.name, lane.optimizer.fresh(entry)
        return
    for name, parameter in lane.parameters.items():
        yield name, {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def _tensor_types(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (state[name].dtype, list(state[name].shape)) for name in sorted(state)}


def _dtypes(types: Mapping[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.dtype]:
    return {name: dtype for name, (dtype, _) in types.items()}


def _told(types: Mapping[str, tuple[torch.dtype, list[int]]]) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {shape}" for name, (dtype, shape) in types.items())
