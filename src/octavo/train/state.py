"""A lane's state as named tensors, and back. It is all that a lane needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.nn.scales import scales
from octavo.optim import Optimizer
from octavo.tensor import FP8Tensor
from octavo.train.lane import Lane

_MODEL, _OPTIMIZER, _LOSS_SCALE, _SCALES = "model.", "optimizer.", "loss_scale.", "scales."


def lane_tensors(lane: Lane) -> dict[str, Tensor]:
    """Return the parameters, persistent buffers, AdamW state and loss scale of `lane` by name, a tied weight once."""
    tensors = {_MODEL + name: tensor for name, tensor in _weights(lane).items()}
    for name, parameter in lane.parameters.items():
        for key, value in lane.optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    tensors |= {_LOSS_SCALE + key: tensor for key, tensor in lane.loss_scale.state_dict().items()}
    book = scales(lane.model)
    return tensors | ({} if book is None else {_SCALES + name: tensor for name, tensor in book.state_dict().items()})


def restore_lane(lane: Lane, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy what `lane_tensors` returned into `lane`. Nothing is copied unless everything fits.

    Raises:
        CheckpointError: a parameter, or a scale that is kept from step to step, is missing, unknown or of another
            shape: it is of another model. Or the optimizer's states are of another tier.
    """
    weights, saved = _weights(lane), _below(_MODEL, tensors)
    _check_same_model(weights, saved, where)
    states = {name: _below(f"{_OPTIMIZER}{name}.", tensors) for name in lane.parameters}
    _check_same_states(lane, states, where)
    if (book := scales(lane.model)) is not None:
        book.load_state_dict(_below(_SCALES, tensors))
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved[name])
    for name, state in states.items():
        if state:
            copied = {key: tensor.to(lane.device, copy=True) for key, tensor in state.items()}
            lane.optimizer.state[lane.parameters[name]] = copied
    lane.loss_scale.load_state_dict(_below(_LOSS_SCALE, tensors))


def random_tensors() -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and each CUDA device's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda.{i}": state for i, state in enumerate(cuda)}}


def restore_random(tensors: Mapping[str, Tensor]) -> None:
    """Set torch's generators to what `random_tensors` returned."""
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _weights(lane: Lane) -> dict[str, Tensor]:
    named = lane.model.state_dict(keep_vars=True)
    unique = {id(tensor): name for name, tensor in reversed(named.items())}
    return dict(part for name in sorted(unique.values()) for part in _stored(name, named[name]))


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a weight consists of: itself, or codes and scales."""
    if isinstance(tensor, FP8Tensor):
        yield from ((f"{name}.{part}", plain) for part, plain in tensor.to_tensors().items())
    else:
        yield name, tensor


def _check_same_model(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: Path) -> None:
    of_another = f"{where}: this is the checkpoint of another model:"
    for name in weights.keys() ^ saved.keys():
        place = "the model" if name in weights else "the checkpoint"
        raise CheckpointError(f"{of_another} only {place} has the parameter '{name}'.")
    for name, tensor in weights.items():
        here, there = list(tensor.shape), list(saved[name].shape)
        if here != there:
            raise CheckpointError(f"{of_another} '{name}' has the shape {there} there and {here} here.")


def _check_same_states(lane: Lane, states: Mapping[str, Mapping[str, Tensor]], where: Path) -> None:
    for name, kept in _kept(lane):
        here, there = _tensor_types(kept), _tensor_types(states[name])
        if there and here != there:
            raise CheckpointError(
                f"{where}: the optimizer's states of '{name}' are of another tier than this run's (--states): saved are"
                f" {_told(there)}; kept are {_told(here)}."
            )


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


def _told(types: Mapping[str, tuple[torch.dtype, list[int]]]) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')} {shape}" for name, (dtype, shape) in types.items())
