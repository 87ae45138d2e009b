"""Checkpoints of a sharded run, by torch.distributed.checkpoint: written by N ranks, read by M.

Every tensor is written by its rows, each rank its own: weights in their own dtype, states as their tier has them. A
scale belongs to rows that one rank has, so that another number of ranks reads the same bits. The exception is a tier
with one scale a tensor (`fp8-lm`): there a scale belongs to a rank's part, and the number of ranks must stay. So must
that of tensor parallel, where ranks that share rows have scales of parts of them. What is no tensor stands in
`octavo.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from octavo.errors import CheckpointError
from octavo.optim import Optimizer, flatten, unflatten
from octavo.optim.sharded import along_rows
from octavo.ranks import is_first_rank
from octavo.tensor import FP8Tensor, local

SETTINGS = "octavo.json"


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any) -> None:
    """Write a sharded model, and its optimizer's state, into a folder that all ranks see. All ranks call it.

    Args:
        extra: what else `load` is to return, as JSON: the number of the step, the place in the data.
    """
    state_dict_saver.save(_write_settings(Path(folder), model, optimizer, extra), checkpoint_id=str(folder))


def save_async(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any) -> Any:
    """Do what `save` does in the background: the tensors are copied to the host, and training may go on.

    Returns:
        A future; `result()` waits until the checkpoint is written, and raises what went wrong.
    """
    state = _write_settings(Path(folder), model, optimizer, extra)
    return state_dict_saver.async_save(state, checkpoint_id=str(folder), process_group=_background_group())


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Read what `save` wrote into a model and an optimizer that are sharded now, and return what `extra` was.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is of another model, another tier, or, where the tier has a
            scale a tensor, of another number of ranks.
    """
    settings = _read_settings(Path(folder))
    if optimizer is not None:
        _check_tiers(optimizer, settings.get("optimizer"), folder)
    state = _state(model, optimizer)
    try:
        state_dict_loader.load(state, checkpoint_id=str(folder))
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"{folder} does not fit this model, its optimizer, or the ranks it is sharded over (rank {rank}: {reason})."
        ) from error
    # Through values the codes could be others of the same value, and a remainder is of these.
    codes = {name: local(part).clone() for name, part in state.get("fp8", {}).items()}
    model.load_state_dict(state["model"])
    for name, shard in _fp8_shards(model).items():
        shard.codes.view(torch.uint8).copy_(codes[f"{name}.codes"])
        shard.scale.copy_(codes[f"{name}.scale"])
    if optimizer is not None:
        optimizer.load_state_dict(unflatten(state["optimizer"], settings["optimizer"]))
    extra: dict[str, Any] = settings["extra"]
    return extra


_background: list[Any] = []
"""The group of all ranks, and that of the same ranks in which checkpoints are written in the background."""


def _background_group() -> Any:
    """Return a group of its own, on the CPU: ranks would take each other's messages for those of training."""
    if not _background or _background[0] is not dist.group.WORLD:
        _background[:] = dist.group.WORLD, dist.new_group(backend="gloo")
    return _background[1]


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint, sharded, in the memory that is trained."""
    state = {"model": dict(model.state_dict())}
    parameters = dict(model.named_parameters())
    codes = {}
    for name, shard in _fp8_shards(model).items():
        for part, tensor in (("codes", shard.codes.view(torch.uint8)), ("scale", shard.scale)):
            codes[f"{name}.{part}"] = along_rows(tensor, parameters[name])
    if codes:
        state["fp8"] = codes
    if optimizer is not None:
        for entry in optimizer.entries():
            if entry.parameter.requires_grad:
                optimizer.prepare(entry)
        state["optimizer"] = flatten(optimizer.state_dict())[0]
    return state


def _fp8_shards(model: nn.Module) -> dict[str, FP8Tensor]:
    """Return this rank's parts of the parameters that are FP8 themselves."""
    shards = {}
    for name, parameter in model.named_parameters():
        shard = local(parameter)
        if isinstance(parameter, DTensor) and isinstance(shard, FP8Tensor):
            shards[name] = shard
    return shards


def _write_settings(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    state = _state(model, optimizer)
    settings: dict[str, Any] = {"extra": extra}
    if optimizer is not None:
        settings["optimizer"] = flatten(optimizer.state_dict())[1]
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1))
    return state


def _read_settings(folder: Path) -> dict[str, Any]:
    missing = [name for name in (SETTINGS, ".metadata") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is not a whole checkpoint: there is no {' and no '.join(missing)}. Take an earlier one."
        )
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    return settings


def _check_tiers(optimizer: Optimizer, saved: Mapping[str, Any] | None, folder: str | Path) -> None:
    if saved is None:
        raise CheckpointError(f"{folder} holds no state of an optimizer: call load(folder, model) for the model alone.")
    here = flatten(optimizer.state_dict())[1]
    for name in ("rule", "param_groups"):
        ours, theirs = here[name], saved[name]
        if name == "param_groups":
            ours, theirs = [group["states"] for group in ours], [group["states"] for group in theirs]
        if ours != theirs:
            raise CheckpointError(
                f"{folder}: the optimizer's {'states are' if name == 'param_groups' else 'rule is'} {theirs} there and "
                f"{ours} here. Make it as it was saved; convert_states() changes the tier after that."
            )
