"""A `TrainState` as named tensors, and back: everything needed to resume bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.lab.train.train_state import TrainState
from octavo.nn.scaling_state import scales
from octavo.optim import Optimizer
from octavo.optim.sharded import along_rows, spread
from octavo.tensor import FP8Tensor, is_distributed, local
from octavo.tensor.local import dtensor_like

_MODEL, _OPTIMIZER, _LOSS_SCALE, _REDUCTION, _SCALES = "model.", "optimizer.", "loss_scale.", "reduction.", "scales."


def state_tensors(train_state: TrainState, *, stored_scales: bool = True) -> dict[str, Tensor]:
    """Return parameters, persistent buffers, optimizer states, loss scale and stored scales by name; tied weights once.

    Sharded tensors are DTensors of plain tensors that share memory with those in training.
    """
    tensors = {_MODEL + name: tensor for name, tensor in _weights(train_state).items()}
    for name, parameter in train_state.parameters.items():
        if parameter.requires_grad:
            # 0 steps stand for a parameter that has had no gradient: without a state it would look incomplete.
            for key, value in (train_state.optimizer.state.get(parameter) or {"step": torch.zeros(())}).items():
                tensors[f"{_OPTIMIZER}{name}.{key}"] = value if is_distributed(value) else spread(key, value, parameter)
    tensors |= {_LOSS_SCALE + key: tensor for key, tensor in train_state.loss_scale.state_dict().items()}
    if train_state.reduction is not None:
        tensors |= {_REDUCTION + key: tensor for key, tensor in train_state.reduction.state_dict().items()}
    if stored_scales and (scaling_state := scales(train_state.model)) is not None:
        tensors |= {_SCALES + name: tensor for name, tensor in scaling_state.state_dict().items()}
    return tensors


def restore_tensors(
    train_state: TrainState,
    tensors: Mapping[str, Tensor],
    where: Path,
    *,
    optimizer: bool = True,
    stored_scales: bool = True,
) -> None:
    """Copy the result of `state_tensors` into `train_state`. Nothing is copied unless everything fits.

    The tensors may be unsharded although those of `train_state` are sharded: each rank then takes its part.

    Args:
        train_state: where to.
        tensors: the result of `state_tensors`.
        where: their origin, for error messages.
        optimizer: also restore the optimizer's states; otherwise they stay unchanged.
        stored_scales: the same for stored scales.

    Raises:
        CheckpointError: a parameter or stored scale is missing, unknown, or of another shape or dtype: the model is
            another one. Or an optimizer state is missing, or of another tier.
    """
    weights, saved = _weights(train_state), _below(_MODEL, tensors)
    _check_same_model(weights, saved, where)
    states = dict(_local_states(train_state, tensors, where)) if optimizer else {}
    if stored_scales and (scaling_state := scales(train_state.model)) is not None:
        scaling_state.load_state_dict(_below(_SCALES, tensors))
    with torch.no_grad():
        for name, tensor in weights.items():
            local(tensor).copy_(local(_sharded_like(saved[name], tensor)))
    for name, state in states.items():
        train_state.optimizer.state.pop(train_state.parameters[name], None)  # before its first step it had none
        if state:
            copied = {key: tensor.to(train_state.device, copy=True) for key, tensor in state.items()}
            train_state.optimizer.state[train_state.parameters[name]] = copied
    if loss_scale := _below(_LOSS_SCALE, tensors):  # none of a run without one, calibrated with one
        train_state.loss_scale.load_state_dict(loss_scale)
    if train_state.reduction is not None:
        train_state.reduction.load_state_dict(_below(_REDUCTION, tensors))


def place(train_state: TrainState, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory to read a tensor of `state_tensors` into, sharded as its parameter is."""
    own = name.partition(".")[2]
    parameter = train_state.parameters.get(own, train_state.parameters.get(own.rpartition(".")[0]))
    if parameter is None or not is_distributed(parameter):
        return torch.empty(shape, dtype=dtype)
    from torch.distributed.tensor import empty

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _weights(train_state: TrainState) -> dict[str, Tensor]:
    persistent = train_state.model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in train_state.model.named_buffers() if name in persistent}
    named = {**train_state.parameters, **buffers}
    return dict(part for name in sorted(named) for part in _stored(name, named[name]))


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a weight consists of: itself, or codes and scales."""
    own = local(tensor)
    parts = {f"{name}.{part}": plain for part, plain in own.to_tensors().items()} if isinstance(own, FP8Tensor) else {}
    for full_name, part in (parts or {name: own}).items():
        if is_distributed(tensor):
            part, is_whole = part.detach(), part.shape == own.shape
            part = dtensor_like(tensor, part, tensor.shape) if is_whole else along_rows(part, tensor)
        yield full_name, part


def _sharded_like(saved: Tensor, like: Any) -> Tensor:
    """Return a saved tensor sharded as `like`; unchanged if it is sharded already, or `like` is not."""
    if is_distributed(saved) or not is_distributed(like):
        return saved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _local_states(
    train_state: TrainState, tensors: Mapping[str, Tensor], where: Path
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each trained parameter's name and its saved optimizer state as this rank keeps it."""
    for name, template in _state_templates(train_state):
        parameter, saved = train_state.parameters[name], _below(f"{_OPTIMIZER}{name}.", tensors)
        if list(saved) == ["step"] and not saved["step"].any():
            yield name, {}
            continue
        state = {
            key: _local_part(key, saved[key], template[key], parameter) if key in template else saved[key]
            for key in saved
        }
        here, there = _tensor_types(template), _tensor_types(state)
        if there.items() < here.items():
            missing = ", ".join(sorted(here.keys() - there.keys()))
            raise CheckpointError(f"{where}: is incomplete: the optimizer's state of '{name}' lacks {missing}.")
        if here != there:
            why = "of another tier than this run's (--states)"
            if _dtypes(here) == _dtypes(there):
                why = "split over another number of ranks (parallel.shard), and have scales per part"
            raise CheckpointError(
                f"{where}: the optimizer's states of '{name}' are {why}: saved are {_described(there)}; kept are"
                f" {_described(here)}."
            )
        yield name, state


def _local_part(key: str, saved: Tensor, template: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a saved optimizer state, shaped like `template` if possible."""
    if is_distributed(template):  # an optimizer of PyTorch keeps DTensors
        return _sharded_like(saved, template)
    spread_out = spread(key, template, parameter)  # as `state_tensors` has it
    return _viewed_like(local(_sharded_like(_viewed_like(saved, spread_out), spread_out)), template)


def _viewed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the same bytes in the dtype and shape of `like`; unchanged if their number differs."""
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
        if tensor.dtype != saved[name].dtype:
            raise CheckpointError(f"{of_another} '{name}' is {saved[name].dtype} there and {tensor.dtype} here.")


def _state_templates(train_state: TrainState) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each trained parameter's name and tensors of the shapes and dtypes of its optimizer state."""
    if isinstance(train_state.optimizer, Optimizer):
        for entry in train_state.optimizer.entries():
            yield entry.name, train_state.optimizer.fresh(entry)
        return
    for name, parameter in train_state.parameters.items():
        if parameter.requires_grad:
            yield name, {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def _tensor_types(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (state[name].dtype, list(state[name].shape)) for name in sorted(state)}


def _dtypes(types: Mapping[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.dtype]:
    return {name: dtype for name, (dtype, _) in types.items()}


def _described(types: Mapping[str, tuple[torch.dtype, list[int]]]) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {shape}" for name, (dtype, shape) in types.items())
