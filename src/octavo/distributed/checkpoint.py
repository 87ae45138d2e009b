"""Checkpoints of a sharded run, by torch.distributed.checkpoint: written by N ranks, read by M.

Every rank writes its rows of each tensor: weights in their own dtype, states in the format of their tier. Scales belong
to rows of one rank, so that a different number of ranks reads the same bits. The exception is a tier with per-tensor
scales (`fp8-lm`): there a scale belongs to a rank's shard, and the number of ranks must not change. Nor must that of
tensor parallel, where scales belong to parts of rows. Everything else is in `octavo.json`. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo._util.dist import gather, together
from octavo.distributed import storage
from octavo.errors import CheckpointError
from octavo.nn.scaling_state import scales
from octavo.optim import Optimizer, convert, flatten, unflatten
from octavo.optim.sharded import along_rows
from octavo.tensor import FP8Tensor, WrapperTensor, local
from octavo.tensor.local import dtensor_like

SETTINGS = "octavo.json"


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any) -> None:
    """Write a sharded model with its stored scales, and its optimizer's state, into a folder shared by all ranks.

    All ranks call it.

    Args:
        extra: further values that `load` returns, as JSON: the step, the position in the data.

    Raises:
        CheckpointError: a rank could not write.
    """
    storage.write(Path(folder), *_contents(model, optimizer, extra))


def save_async(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any) -> Any:
    """Save in the background: the tensors are copied to the host first, and training can continue.

    Returns:
        A future; `result()` waits until the checkpoint is written, and raises the errors of `save`.
    """
    tensors, texts = _contents(model, optimizer, extra)
    return storage.write_async(Path(folder), tensors, texts, _background_group(dist.group.WORLD))


def load(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load a checkpoint of `save` into a sharded model and optimizer, and return its `extra` values.

    All ranks call it. Nothing is changed unless everything fits and is finite. Only if a file that was read before
    cannot be read again, parameters and states may be partly overwritten.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or its model, tier or, with per-tensor scales, number
            of ranks differs.
        NonFiniteError: a parameter or a state of the optimizer has a NaN or an infinity.
    """
    names = [f"model.{name}" for name, _ in model.named_parameters()]  # a buffer may hold infinities, as a mask
    finite = {*itertools.chain(*gather(names))}
    _check_files(Path(folder), lambda name: name in finite or (optimizer is not None and name.startswith("optimizer.")))
    settings: dict[str, Any] = json.loads((Path(folder) / SETTINGS).read_text())
    if optimizer is not None:
        _check_tiers(optimizer, settings.get("optimizer"), folder)
    state = _state(model, optimizer)
    _check_model(state["model"], Path(folder))
    if optimizer is not None:
        state["optimizer"] = _as_saved(optimizer, state["optimizer"], settings["optimizer"], Path(folder))
    storage.read(Path(folder), _flat(state))
    # Codes requantised from values could differ from those that the remainders belong to.
    codes = {name: local(part).clone() for name, part in state.get("fp8", {}).items()}
    model.load_state_dict(state["model"])
    for name, shard in _fp8_shards(model).items():
        shard.codes.view(torch.uint8).copy_(codes[f"{name}.codes"])
        shard.scale.copy_(codes[f"{name}.scale"])
    if (scaling_state := scales(model)) is not None:
        scaling_state.load_state_dict(state["scales"])
        scaling_state.is_held = optimizer is not None  # which will step, maybe after steps of others
    if optimizer is not None:
        optimizer.load_state_dict(unflatten(state["optimizer"], settings["optimizer"]))
    extra: dict[str, Any] = settings["extra"]
    return extra


def _as_saved(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], folder: Path
) -> dict[str, Tensor]:
    """Return tensors of the optimizer's state by the names that they have in a checkpoint: number and kind.

    Numbers are those of the saved order of parameters. Older versions gave codes the names of moments.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    there = convert.in_order(optimizer, {**saved, "state": {number: number for number in numbers}})["state"]
    written = storage.shapes(folder)
    result = {}
    for name, tensor in tensors.items():
        number, _, kind = name.partition(".")
        name = f"{there[int(number)]}.{kind}"
        if f"optimizer.{name}" not in written:
            name = f"{there[int(number)]}.{next(iter(convert.with_stored_names({kind: tensor})))}"
        result[name] = tensor
    return result


_background_groups: dict[Any, Any] = {}
"""The group of `_background_group`, by that of all ranks. Not a function cache: a forecast of memory on one rank would
empty it, and all ranks must make a group together."""


def _background_group(world: Any) -> Any:
    """Return a separate CPU group of all ranks, so that its messages do not mix with those of training."""
    if world not in _background_groups:
        _background_groups.clear()
        _background_groups[world] = dist.new_group(backend="gloo")
    return _background_groups[world]


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint, sharded; those of model and optimizer share its memory."""
    state = {"model": dict(model.state_dict())}
    parameters = dict(model.named_parameters())
    codes = {}
    for name, shard in _fp8_shards(model).items():
        for part, tensor in (("codes", shard.codes.view(torch.uint8)), ("scale", shard.scale)):
            codes[f"{name}.{part}"] = along_rows(tensor, parameters[name])
    if codes:
        state["fp8"] = codes
    if (scaling_state := scales(model)) is not None:
        state["scales"] = scaling_state.state_dict()
    if optimizer is not None:
        for entry in optimizer.entries():
            if entry.parameter.requires_grad:
                optimizer.prepare(entry)
        state["optimizer"] = flatten(optimizer.state_dict())[0]
    return state


def _fp8_shards(model: nn.Module) -> dict[str, FP8Tensor]:
    """Return this rank's shards of FP8 parameters."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    return {name: shard for name, p in parameters.items() if isinstance(shard := local(p), FP8Tensor)}


def _flat(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, named in state.items() for name, tensor in named.items()}


def _check_files(folder: Path, finite: Callable[[str], bool]) -> None:
    """Check the files, each by one rank; all ranks raise if one finds a fault."""
    if not (folder / SETTINGS).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint: there is no {SETTINGS}. Take an earlier one.")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    together(lambda: storage.check_files(folder, finite, rank=rank, ranks=ranks))


def _check_model(here: Mapping[str, Tensor], folder: Path) -> None:
    """Check that this model, or that of another rank, as a stage of a pipeline, has every tensor of the one saved."""
    known = gather(list(here))
    saved = {name.removeprefix("model.") for name in storage.shapes(folder) if name.startswith("model.")}
    if missing := sorted(saved.difference(*known)):
        raise CheckpointError(
            f"{folder} does not fit this model: {len(missing)} of its {len(saved)} tensors are unknown here, such as "
            f"'{missing[0]}'."
        )


def _contents(
    model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a checkpoint, and the content of its other file."""
    state = _state(model, optimizer)
    settings: dict[str, Any] = {"extra": extra}
    if optimizer is not None:
        settings["optimizer"] = flatten(optimizer.state_dict())[1]
    return _flat(state), {SETTINGS: json.dumps(settings, indent=1)}


def _check_tiers(optimizer: Optimizer, saved: Mapping[str, Any] | None, folder: str | Path) -> None:
    if saved is None:
        raise CheckpointError(f"{folder} holds no state of an optimizer: call load(folder, model) for the model alone.")
    here = flatten(optimizer.state_dict())[1]
    sizes = [sorted(len(group["params"]) for group in each["param_groups"]) for each in (here, saved)]
    rules = [each["rule"] for each in (here, saved)]
    if sizes[0] == sizes[1] and rules[0] == rules[1]:
        saved = convert.in_order(optimizer, {**saved, "state": {}})
    tiers = [[group["states"] for group in each["param_groups"]] for each in (here, saved)]
    for what, (ours, theirs) in {"rule is": rules, "numbers of parameters are": sizes, "states are": tiers}.items():
        if ours != theirs:
            raise CheckpointError(
                f"{folder}: the optimizer's {what} {theirs} there and {ours} here. Make it as it was saved; "
                "convert_states() changes the tier after that."
            )


def plain_values_hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace wrapped and FP8 weights in a state dict by plain values in the parameter's dtype: a state-dict hook."""
    for name in module._parameters:
        found = state.get(prefix + name)
        if isinstance(found, DTensor) and isinstance(found._local_tensor, (WrapperTensor, FP8Tensor)):
            values = local(found)
            state[prefix + name] = dtensor_like(found, values.dequantize() if isinstance(values, FP8Tensor) else values)
