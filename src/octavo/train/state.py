"""A lane's state as named tensors, and back. It is all that a lane needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.nn.scales import scales
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
            shape: it is of another model.
    """
    weights = _weights(lane)
    saved = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
    _check_same_model(weights, saved, where)
    if (book := scales(lane.model)) is not None:
        kept = {name.removeprefix(_SCALES): tensor for name, tensor in tensors.items() if name.startswith(_SCALES)}
        book.load_state_dict(kept)
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved[name])
    for name, parameter in lane.parameters.items():
        prefix = f"{_OPTIMIZER}{name}."
        state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if state:
            lane.optimizer.state[parameter] = {key: t.to(lane.device, copy=True) for key, t in state.items()}
    lane.loss_scale.load_state_dict({key.removeprefix(_LOSS_SCALE): tensor for key, tensor in tensors.items()})


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


def _weights(lane: Lane) -> dict[str, Tensor]:
    named = lane.model.state_dict(keep_vars=True)
    unique = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: named[name] for name in sorted(unique.values())}


def _check_same_model(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: Path) -> None:
    of_another = f"{where}: this is the checkpoint of another model:"
    for name in weights.keys() ^ saved.keys():
        place = "the model" if name in weights else "the checkpoint"
        raise CheckpointError(f"{of_another} only {place} has the parameter '{name}'.")
    for name, tensor in weights.items():
        here, there = list(tensor.shape), list(saved[name].shape)
        if here != there:
            raise CheckpointError(f"{of_another} '{name}' has the shape {there} there and {here} here.")
