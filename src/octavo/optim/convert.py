"""Conversion of states: to FP32 values, other tiers, the state dict of `torch.optim.AdamW`, and tensors for a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError, UnsupportedError
from octavo.kernels.optimizer import Layout, Slot, reference
from octavo.kernels.storage import Storage
from octavo.kernels.storage import reference as codec
from octavo.optim.sharded import spread, unspread
from octavo.optim.states import RuleName, States
from octavo.optim.tensors import as_matrix, check, like, like_state, matrix_shape, slot_of, stored_weight, value_of
from octavo.tensor import local

if TYPE_CHECKING:
    from octavo.optim.optimizer import Entry, Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = {name: f"{name}_codes" for name in MOMENTS}
"""Names of moments in a state dict where they are not stored as values: PyTorch's optimizers, which would take codes
under their own names as values, then miss theirs."""
_OWN = ("states", "keeps", "gradients")
"""Storage settings of a group, which are not loaded."""
_EXPORTED = ("lr", "betas", "eps", "weight_decay", "maximize", "momentum", "nesterov", "ns_coefficients", "ns_steps")
"""Settings shared with PyTorch's optimizers."""


def master(optimizer: Optimizer, entry: Entry) -> Tensor:
    """Return the FP32 master of a parameter, in its shape."""
    optimizer.follow_writes([entry])
    slot, layout = _slot(optimizer, entry)
    return _from_groups(reference.read_weight(slot, layout), entry)


def set_master(optimizer: Optimizer, entry: Entry, value: Tensor) -> None:
    """Set the FP32 master of a parameter, and its weight, rounded to nearest."""
    slot, layout = _slot(optimizer, entry)
    reference.write_weight(_to_groups(value, entry), slot, layout, None)
    if layout.master is not None:
        optimizer.record_versions([entry])


def follow_weight(optimizer: Optimizer, entry: Entry) -> None:
    """Update a separate master where its weight was written since it was rounded from the master."""
    slot, layout = _slot(optimizer, entry)
    known = reference.read_weight(slot, layout)
    written = codec.to_groups(as_matrix(value_of(entry.parameter), entry.parameter))
    reference.write_weight(known, slot, layout, None)
    is_same = written == codec.to_groups(as_matrix(value_of(entry.parameter), entry.parameter))
    reference.write_weight(torch.where(is_same, known, written), slot, layout, None)


def values(optimizer: Optimizer, entry: Entry) -> dict[str, Tensor]:
    """Return a parameter's state in FP32: `step`, the moments, and `master`."""
    held, state = master(optimizer, entry), optimizer.state[entry.parameter]
    stored = {name: _moment(optimizer, entry, name) for name in MOMENTS if name in state}
    moments = {name: _from_groups(reference.read(*moment), entry) for name, moment in stored.items()}
    return {"step": state["step"].clone(), "master": held, **moments}


def set_values(optimizer: Optimizer, entry: Entry, known: Mapping[str, Tensor]) -> None:
    """Set a parameter's state from the result of `values`, in its current tier."""
    state = optimizer.state[entry.parameter]
    state.clear()
    state.update(optimizer.fresh(entry))
    state["step"].copy_(known["step"])
    if "master" in known:
        set_master(optimizer, entry, known["master"])
    else:
        optimizer.initialise_master(entry)
    for name in MOMENTS:
        if name in state:
            reference.write(_to_groups(known[name], entry), *_moment(optimizer, entry, name), None)


def with_saved_names(optimizer: Optimizer, entry: Entry, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a parameter with the names that its tensors have in a state dict."""
    layout = optimizer.layout_of(entry)
    stored = zip(MOMENTS, (layout.first, layout.second), strict=True)
    names = {name: _CODES[name] for name, storage in stored if storage is not None and not storage.holds_values}
    return {names.get(name, name): tensor for name, tensor in state.items()}


def with_stored_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `with_saved_names`; also for a state whose codes have the names of moments, as older versions wrote it."""
    names = {saved: stored for stored, saved in _CODES.items()}
    return {names.get(name, name): value for name, value in saved.items()}


def in_order(
    optimizer: Optimizer, state_dict: Mapping[str, Any], groups: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return a state dict in the order of an optimizer's groups and parameters, which are numbered from 0.

    Parameters are matched by name where both sides have names, otherwise by position. Prefixes of wrappers, such as
    `module.` of `DistributedDataParallel`, do not count.

    Args:
        groups: those of the optimizer that the state dict is of; by default all.

    Raises:
        CheckpointError: the number of groups or of their parameters differs, or their names do.
    """
    here = optimizer.param_groups if groups is None else [optimizer.param_groups[index] for index in groups]
    there = list(state_dict["param_groups"])
    sizes = [[len(group["params"]) for group in side] for side in (there, here)]
    has_names = all("param_names" in group for group in (*here, *there))
    if has_names and sorted(sizes[0]) == sorted(sizes[1]):
        there = _ordered_by_name(here, there)
    elif sizes[0] != sizes[1]:
        raise CheckpointError(
            f"optimizer state: its groups have {sizes[0]} parameters, those of this optimizer {sizes[1]}: it belongs to"
            " another model."
        )
    numbers = {number: place for place, number in enumerate(n for group in there for n in group["params"])}
    state = {numbers[number]: value for number, value in state_dict["state"].items() if number in numbers}
    renumbered = [{**group, "params": [numbers[number] for number in group["params"]]} for group in there]
    return {**state_dict, "state": state, "param_groups": renumbered}


def _ordered_by_name(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict, and their parameters, in the order of an optimizer's."""
    saved, ordered = [dict(zip(_plain_names(group), group["params"], strict=True)) for group in there], []
    remaining = list(range(len(there)))
    for index, group in enumerate(here):
        names = _plain_names(group)
        match = next((i for i in remaining if saved[i].keys() == set(names)), None)
        if match is None:
            only = [sorted(saved[index].keys() - set(names))[:3], sorted(set(names) - saved[index].keys())[:3]]
            raise CheckpointError(
                f"optimizer state: parameters of its group {index} have other names than those of this optimizer: only"
                f" there {only[0]}, only here {only[1]}. It belongs to another model or to other groups. To load it by"
                " position after a renaming, remove 'param_names' from its groups."
            )
        remaining.remove(match)
        numbers = [saved[match][name] for name in names]
        ordered.append({**there[match], "params": numbers, "param_names": list(group["param_names"])})
    return ordered


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that wrappers of modules add."""


def _plain_names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters without the parts that wrappers add, if they stay different."""
    names = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in group["param_names"]]
    return names if len(set(names)) == len(names) else list(group["param_names"])


def load(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """See `Optimizer.load_state_dict`."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, dict(state_dict)) or state_dict
    state_dict = in_order(optimizer, state_dict)
    state_dict["state"] = {number: with_stored_names(saved) for number, saved in state_dict["state"].items()}
    if state_dict.get("rule", optimizer.rule) != optimizer.rule:
        raise CheckpointError(
            f"optimizer state: its rule is '{state_dict['rule']}', that of this optimizer '{optimizer.rule}'."
        )
    entries = _matched(optimizer, state_dict, range(len(optimizer.param_groups)))
    for entry, saved in entries:
        check_state(optimizer, entry, saved)
    optimizer.forget(optimizer.entries())
    optimizer.state.clear()  # of parameters, too, that its groups no longer have
    for entry, saved in entries:
        optimizer.state[entry.parameter] = {
            name: like_state(name, tuple(t.shape), t.dtype, entry.parameter).copy_(t) for name, t in saved.items()
        }
    for group, other in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        _set(group, {key: value for key, value in other.items() if key not in ("params", "param_names", *_OWN)})
    optimizer.record_versions(entry for entry, saved in entries if "master" in saved)
    optimizer.seed = state_dict.get("seed", optimizer.seed)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def export(optimizer: Optimizer, groups: Sequence[int]) -> dict[str, Any]:
    """See `Optimizer.export_state_dict`; for these groups, with parameters numbered from 0."""
    entries = [entry for entry in optimizer.entries() if entry.group in groups]
    numbers = {entry.number: place for place, entry in enumerate(entries)}
    state = {}
    for entry in entries:
        if optimizer.state[entry.parameter]:
            names = _exported_names(optimizer.rule_of(entry))
            known = values(optimizer, entry)
            known = {name: spread(name, value, entry.parameter) for name, value in known.items()}
            state[numbers[entry.number]] = {names[name]: value for name, value in known.items() if name in names}
    packed = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    exported = []
    for index in groups:
        rule = optimizer.param_groups[index].get("rule", optimizer.rule)
        settings = _PYTORCHS.get(rule, torch.optim.AdamW)([torch.zeros(1, 1, dtype=torch.float32)]).param_groups[0]
        own = {key: value for key, value in packed[index].items() if key not in (*_OWN, "clip", "rule")}
        exported.append({**settings, **own, "params": [numbers[number] for number in packed[index]["params"]]})
    return {"state": state, "param_groups": exported}


def import_(optimizer: Optimizer, state_dict: Mapping[str, Any], groups: Sequence[int]) -> None:
    """See `Optimizer.import_state_dict`; for these groups."""
    check_import(optimizer, state_dict, groups)
    state_dict = in_order(optimizer, state_dict, groups)
    entries = _matched(optimizer, state_dict, groups)
    found = {entry.number for entry, _ in entries}
    optimizer.forget(e for e in optimizer.entries() if e.group in groups and e.number not in found)
    for entry, saved in entries:
        names = _exported_names(optimizer.rule_of(entry))
        state = optimizer.state[entry.parameter]
        known = {ours: torch.as_tensor(saved[theirs]) for ours, theirs in names.items() if theirs in saved}
        # PyTorch's Muon does not count steps; the number affects only the random bits.
        known.setdefault("step", state["step"].clone() if state else torch.zeros((), dtype=torch.float32))
        set_values(optimizer, entry, {**known, **({"master": master(optimizer, entry)} if state else {})})
    for index, other in zip(groups, state_dict["param_groups"], strict=True):
        _set(optimizer.param_groups[index], {key: other[key] for key in _EXPORTED if key in other})


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set settings of a group to copies. A tensor is overwritten in place: CUDA graphs and compiled code read it."""
    for key, value in settings.items():
        held = group.get(key)
        if isinstance(held, Tensor):
            held.copy_(torch.as_tensor(value))
        else:
            group[key] = copy.deepcopy(value)


def check_import(optimizer: Optimizer, state_dict: Mapping[str, Any], groups: Sequence[int]) -> None:
    """Check that `import_` can read a state dict.

    Raises:
        CheckpointError: the number or the names of parameters differ, a tensor is missing or has another shape, or the
            state is that of amsgrad or stored as codes.
    """
    if any(group.get("amsgrad") for group in state_dict["param_groups"]):
        raise CheckpointError(
            "optimizer state: it was saved by an optimizer with amsgrad, which octavo.optim does not have."
        )
    for entry, saved in _matched(optimizer, in_order(optimizer, state_dict, groups), groups):
        if encoded := sorted(name for name in saved if name.endswith(("_codes", "_scale"))):
            raise CheckpointError(
                f"optimizer state of parameter '{entry.name}': {encoded} are of codes, as Octavo's state_dict() stores"
                " them, and here values are imported. Load it by load_state_dict() into an optimizer with the states it"
                " was saved with, then call convert_states()."
            )
        names = _exported_names(optimizer.rule_of(entry))
        moments = [names[name] for name in optimizer.form(entry) if name in MOMENTS]
        needed = {*moments, *(("step",) if "step" in names.values() else ())}
        if missing := needed - set(saved):
            raise CheckpointError(f"optimizer state of parameter '{entry.name}': {sorted(missing)} missing.")
        for name in moments:
            if saved[name].shape != local(entry.parameter).shape:
                there, here = list(saved[name].shape), list(local(entry.parameter).shape)
                raise CheckpointError(
                    f"optimizer state of parameter '{entry.name}': '{name}' has the shape {there} there, {here} here."
                )


_PYTORCHS: dict[RuleName, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "muon": torch.optim.Muon}


def _exported_names(rule: RuleName) -> dict[str, str]:
    """Return the names of state tensors in PyTorch's optimizer of that rule, by Octavo's names."""
    if rule == "muon":
        return {"exp_avg": "momentum_buffer"}
    return {name: name for name in ("step", *MOMENTS)}


def _matched(
    optimizer: Optimizer, state_dict: Mapping[str, Any], groups: Sequence[int]
) -> list[tuple[Entry, Mapping[str, Any]]]:
    """Return the parameters of these groups with a saved state, and the state; of a result of `in_order`."""
    saved = state_dict["state"]
    entries = enumerate(entry for entry in optimizer.entries() if entry.group in groups)
    return [(entry, unspread(saved[place], optimizer, entry)) for place, entry in entries if saved.get(place)]


def check_state(optimizer: Optimizer, entry: Entry, saved: Mapping[str, Any]) -> None:
    """Check that a saved state has the form that this optimizer stores for a parameter.

    Raises:
        CheckpointError: tier, rule or shape differs.
    """
    here = optimizer.form(entry)
    tier = optimizer.states_of(entry).name
    where = f"optimizer state of parameter '{entry.name}'"
    if any(not isinstance(value, Tensor) for value in saved.values()) or set(saved) != set(here):
        raise CheckpointError(
            f"{where}: found {sorted(saved)}, but '{tier}' keeps {sorted(here)}: it is of another tier or optimizer. "
            "Load it into an optimizer with the states it was saved with, then call convert_states(); or, from "
            "torch.optim.AdamW, import_state_dict()."
        )
    for name, (shape, dtype) in here.items():
        if saved[name].shape != shape:
            raise CheckpointError(
                f"{where}: '{name}' has the shape {list(saved[name].shape)} there and {list(shape)} here."
            )
        if saved[name].dtype != dtype:
            raise CheckpointError(
                f"{where}: '{name}' is {saved[name].dtype} there and {dtype} here, as '{tier}' keeps it. Load it"
                " into an optimizer with the states it was saved with, then call convert_states()."
            )


def check_form(optimizer: Optimizer, entry: Entry) -> None:
    """Check that the state of a parameter is of the form that the parameter, as it is now, needs.

    Raises:
        ConfigError: the parameter is of a dtype or in an order that the kernels do not step.
        UnsupportedError: dtype, shape, device or memory order of the parameter has changed, or its tier was.
    """
    parameter, state = entry.parameter, optimizer.state[entry.parameter]
    where = f"optimizer: parameter '{entry.name}'"
    check(parameter, where)
    needed = {name: (*form, parameter.device) for name, form in optimizer.form(entry).items()}
    found = {name: (tuple(tensor.shape), tensor.dtype, tensor.device) for name, tensor in state.items()}
    for name in (*needed, *found):
        here, there = needed.get(name), found.get(name)
        if here != there or not _is_aligned(name, state[name], parameter):
            raise UnsupportedError(
                f"{where}: its state has '{name}' as {_described(there)}, the parameter as it is now"
                f" ({stored_weight(parameter).dtype}, states '{optimizer.states_of(entry).name}') needs"
                f" {_described(here)} in the parameter's memory order. Convert a model before its optimizer makes a"
                " step, and a tier by convert_states(); or make a new optimizer for the parameters as they are, and"
                " import what export_state_dict() returned before the change."
            )


def _described(form: tuple[tuple[int, ...], torch.dtype, torch.device] | None) -> str:
    return "none" if form is None else f"{list(form[0])} {form[1]} on {form[2]}"


def _is_aligned(name: str, tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether a state tensor is a matrix in the memory order of its parameter: others would step a copy.

    Scales are contiguous in any case: kernels take the address of the first.
    """
    if name == "step" or not tensor.numel():
        return True
    if name.endswith("_scale"):
        return tensor.is_contiguous()
    matrix = as_matrix(tensor, parameter)
    return matrix.is_contiguous() and matrix.data_ptr() == tensor.data_ptr()


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a state dict as tensors by name, for safetensors, and the rest, for JSON.

    Tensors are named `<number of the parameter>.<name>`; settings that are tensors become numbers.
    """
    tensors = {f"{number}.{name}": t for number, state in state_dict["state"].items() for name, t in state.items()}
    groups = [{key: _plain(value) for key, value in group.items()} for group in state_dict["param_groups"]]
    return tensors, {**{k: v for k, v in state_dict.items() if k != "state"}, "param_groups": groups}


def unflatten(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`, also where the rest has been through JSON."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    pairs = ("betas", "ns_coefficients")
    groups = [{k: tuple(v) if k in pairs else v for k, v in group.items()} for group in rest["param_groups"]]
    return {**rest, "state": state, "param_groups": groups}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return value.name if isinstance(value, States) else value


def _slot(optimizer: Optimizer, entry: Entry) -> tuple[Slot, Layout]:
    check_form(optimizer, entry)
    layout, parameter = optimizer.layout_of(entry), entry.parameter
    nothing = torch.empty(0, dtype=torch.float32)
    return slot_of(0, entry.number, parameter, nothing, optimizer.state[parameter], layout), layout


def _moment(optimizer: Optimizer, entry: Entry, name: str) -> tuple[Tensor, Tensor | None, Storage]:
    """Return codes, scales and storage of a moment, `exp_avg` or `exp_avg_sq`."""
    state, layout = optimizer.state[entry.parameter], optimizer.layout_of(entry)
    storage = layout.first if name == "exp_avg" else layout.second
    assert storage is not None
    return as_matrix(state[name], entry.parameter), state.get(f"{name}_scale"), storage


def _from_groups(groups: Tensor, entry: Entry) -> Tensor:
    result = like(entry.parameter, torch.float32)
    as_matrix(result, entry.parameter).copy_(codec.from_groups(groups, *matrix_shape(entry.parameter)))
    return result


def _to_groups(value: Tensor, entry: Entry) -> Tensor:
    return codec.to_groups(as_matrix(like(entry.parameter, torch.float32).copy_(value), entry.parameter))
