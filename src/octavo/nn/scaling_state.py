"""Scales stored from step to step: one `ScalingState` per model, one slot per layer, updated once per optimizer step.

    scale_and_amax  FP32 (n, 2)       [scale, amax] of a layer's input, then of its grad_output; so on for each layer
    history         FP32 (length, n)  maxima of earlier steps, the newest first, 0 if there is none yet

A layer quantises with its scale and raises the amax (`octavo.kernels.quantize_with_scale`). After an
optimizer step `update_scales` moves every amax into the history and computes the next scale:

    scale = choose(history) / largest value of the format * 2^margin        (Transformer Engine, DelayedScaling)

A scale of 0 means unknown: the tensor is then scaled by its own maximum, so that no step uses an arbitrary scale of 1.
The step of an optimizer updates the states of models that it has a parameter of; this is determined at each step,
because `fully_shard` replaces parameters. An optimizer without a parameter of any model, for example of a prompt before
frozen layers or of FP32 copies of the weights, updates the states that no other optimizer has updated so far.

A scale of earlier steps is right while it is updated. So scales are forgotten, which makes them unknown, if updates do
not come: in a copy that no optimizer steps, such as an average of the weights or a teacher, once two steps of others
have passed (`STEPS_OF_OTHERS`); and in a model whose weights change without an optimizer, or that has run many more
forwards than between earlier updates. Such a loop calls `octavo.scales(model).update_scales()` after its own updates.
Compiled code does not count its forwards.

Nothing here waits for the device, and no memory changes its address, as CUDA graphs require. The state is stored beside
the model, not in its `state_dict`, whose names are the user's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim.optimizer import Optimizer

from octavo._util.dist import in_process_group
from octavo._util.optimizer_steps import after_outermost_step
from octavo.errors import CheckpointError
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn import calibration_file
from octavo.nn.calibration_file import Calibrated, Provenance
from octavo.nn.modules import full_name
from octavo.numerics import format_named, scale_from_amax
from octavo.recipes import STORED_SCALE_ROLES, History, Operand, Recipe


@dataclass(eq=False)
class ScalingSlot:
    """The stored scales of a layer, or of all layers that share an input."""

    number: int
    """Index of its first row, divided by `len(STORED_SCALE_ROLES)`."""
    scale_and_amax: Tensor
    """FP32 (2, 2), a view: [scale, amax] of the input and of grad_output. 16 bytes, so that all slots are aligned:
    compiled code would copy an unaligned input."""
    forwards: int = 0
    """Forwards with gradients since the last update, in eager mode."""
    weight: tuple[int, int] | None = None
    """The first layer's weight in the last of them, by `id` and version."""


STEPS_OF_OTHERS = {False: 2, True: 16}
"""Steps of other optimizers after which a state is out of date, by whether one has ever held its model: a copy is as
good as its original until that has stepped twice, and models that are trained in turns may wait longer."""
FORWARDS = 8
"""A state is out of date after so many times as many forwards as between two updates, and one more time as many."""


class StoredScaleLayer(Protocol):
    """A layer whose recipe may store scales."""

    recipe: Recipe
    weight: Tensor
    shared: Any
    scaling_state: ScalingState | None
    scaling_slot: ScalingSlot | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """Operand scaled by a row of `ScalingState.scale_and_amax`."""

    names: tuple[str, ...]
    """`<layer>.input` or `<layer>.grad_output`, of each layer that shares it."""
    operand: Operand
    recipe: Recipe


class ScalingState:
    """Stored scales of a model's layers. Found by `octavo.scales(model)`, saved and loaded as a calibration file."""

    scale_and_amax: Tensor
    """FP32 (n, 2), see above. Rows of roles without a stored scale are unused."""
    history: Tensor
    """FP32 (length, n), with the largest length of all recipes."""
    is_held: bool
    """Whether an optimizer that has stepped has a parameter of its model: then no other one updates it."""
    _missed, _most, _is_forgotten = 0, 0, False
    """Steps of other optimizers since the last update; most forwards of a slot between updates; see `forget`."""

    def __init__(self, layers: Mapping[str, StoredScaleLayer], model: nn.Module | None = None) -> None:
        """Create unknown scales, and give each layer its slot; layers that share an input share a slot.

        Args:
            layers: by full name, with recipes that store scales.
            model: the model that they are part of, if known.
        """
        self._entries: dict[int, _Entry] = {}
        groups = names_by_input(layers)
        for number, names in enumerate(groups):
            recipe = layers[names[0]].recipe
            for row, role in enumerate(STORED_SCALE_ROLES, start=number * len(STORED_SCALE_ROLES)):
                if (operand := recipe.stored_scale(role)) is not None:
                    self._entries[row] = _Entry(tuple(full_name(name, role) for name in names), operand, recipe)
        rows = len(groups) * len(STORED_SCALE_ROLES)
        length = max((entry.recipe.history.length for entry in self._entries.values()), default=1)
        device = next(iter(layers.values())).weight.device
        self.scale_and_amax = torch.zeros(rows, 2, device=device, dtype=torch.float32)
        self.history = torch.zeros(length, rows, device=device, dtype=torch.float32)
        self._slots = [ScalingSlot(number, self._of_slot(number)) for number in range(len(groups))]
        self._rows = self._find_rows()
        self._layers = [ref(layer) for layer in layers.values()]
        self._model = None if model is None else ref(model)
        self.is_held = False
        for slot, names in zip(self._slots, groups, strict=True):
            for name in names:
                layers[name].scaling_state, layers[name].scaling_slot = self, slot
        _live[next(_numbers)] = self

    def move(self, device: torch.device) -> None:
        """Move the scales to another device; all slots follow. From the meta device they are zeros."""
        if device == self.scale_and_amax.device:
            return
        was_meta = self.scale_and_amax.is_meta
        for name in ("scale_and_amax", "history"):
            old = getattr(self, name)
            setattr(self, name, torch.zeros_like(old, device=device) if was_meta else old.to(device))
        self._bind()
        self._rows = self._find_rows()

    def belongs_to(self, parameters: Container[int]) -> bool:
        """Return whether any weight of its layers, or parameter of their model, is among these (by `id`)."""
        weights = (layer.weight for found in self._layers if (layer := found()) is not None)
        model = None if self._model is None else self._model()
        others = () if model is None else model.parameters()
        return any(id(parameter) in parameters for parameter in itertools.chain(weights, others))

    @torch.no_grad()
    def recalibrate(
        self, names: Collection[str] | None = None, margin: int = 0, how: str = ""
    ) -> dict[str, Calibrated]:
        """Recompute static scales from the largest values since they were set, and return them. Waits for the device.

        A scale whose amax is 0 or not finite is unchanged. All ranks must call it, with the same names.

        Args:
            names: of the scales, `<layer>.input` or `<layer>.grad_output`; all by default. Layers that
                share an input share its scale.
            margin: bits of headroom: scales are multiplied by 2^margin.
            how: text of their `Provenance`.
        """
        rows = [
            row
            for row, entry in self._entries.items()
            if entry.operand.scale_from == "static" and (names is None or not set(names).isdisjoint(entry.names))
        ]
        amax = self._amax_of_all_ranks()
        known = amax.tolist()
        made = [row for row in rows if 0 < known[row] < math.inf]
        for row in made:
            operand = self._entries[row].operand
            scale = _scale_of(amax[row], operand, margin)
            self.scale_and_amax.data[row, 0], self.scale_and_amax.data[row, 1] = scale, 0.0
            self.history.data[0, row] = amax[row]  # the maximum that the scale was made from
        return dict(self._calibrated(how, made))

    @torch.no_grad()
    def update_scales(self) -> None:
        """Compute the next scales. One whose amax is 0 or not finite is unchanged: its tensor was not seen.

        The optimizer's step calls it. Across ranks one all-reduce takes the maximum of the maxima first.
        """
        self._update()

    def _update(self, are_owned: bool = True) -> None:
        """See `update_scales`. are_owned: False if tensors not seen may be those of a copy, so that maxima age."""
        # .data: without a new version, see `kernels.quantize_with_scale`
        stored, history = self.scale_and_amax.data, self.history.data
        amax = self._amax_of_all_ranks()
        for (operand, rule), rows in self._rows.items():
            seen, past = amax[rows], history[: rule.length, rows]
            is_new = (seen > 0) & (seen < torch.inf)
            unseen = past if are_owned else torch.cat([torch.zeros_like(past[:1]), past[:-1]])
            past = torch.where(is_new, torch.cat([seen[None], past[:-1]]), unseen)
            chosen = past.amax(0) if rule.choose == "max" else past[0]
            scale = _scale_of(chosen, operand, rule.margin)
            before = stored[rows, 0] if are_owned else stored[rows, 0] * (past.amax(0) > 0)
            history[: rule.length, rows] = past
            stored[rows, 0] = torch.where(is_new, scale, before)
            stored[:, 1].index_fill_(0, rows, 0.0)  # assigning 0.0 would copy it to the GPU and wait
        self._most = max(self._most, max(slot.forwards for slot in self._slots))
        for slot in self._slots:
            slot.forwards, slot.weight = 0, None
        self._missed, self._is_forgotten = 0, False

    @torch.no_grad()
    def forget(self, why: str) -> None:
        """Make scales of earlier steps unknown until the next update; until then maxima of the tensors give scales."""
        if self._is_forgotten or not self._rows:
            return
        for rows in self._rows.values():
            self.scale_and_amax.data[:, 0].index_fill_(0, rows, 0.0)
            self.history.data.index_fill_(1, rows, 0.0)
        self._is_forgotten = True
        warn_once(
            f"scales of earlier steps are out of date: {why}. Until an optimizer of the model steps, each tensor is "
            "scaled by its own maximum. After an update of your own call octavo.scales(model).update_scales()"
        )

    def miss_step(self) -> None:
        """Note that an optimizer has stepped which does not update this state."""
        self._missed += 1
        if self._missed >= STEPS_OF_OTHERS[self.is_held]:
            self.forget("a copy of a model, or a model without an optimizer, has missed the steps of others")

    def note_forward(self, slot: ScalingSlot, layer: StoredScaleLayer) -> None:
        """Note a forward with gradients of a layer: too many without an update mean that none will come."""
        if torch.compiler.is_compiling():
            return
        slot.forwards += 1
        now = layer.weight
        before, slot.weight = slot.weight, (id(now), 0 if now.is_inference() else now._version)
        if before is not None and before[0] == id(now) and before != slot.weight:
            self.forget("weights have changed without a step of an optimizer")
        elif self._most and slot.forwards > FORWARDS * (self._most + 1):
            self.forget(f"{slot.forwards} forwards have had no step of an optimizer")

    def state_dict(self) -> dict[str, Tensor]:
        """Return [scale, amax, *history] of each scale by name, FP32 (2 + length,), as copies on the CPU."""
        table = torch.cat([self.scale_and_amax.t(), self.history]).t().cpu()
        return {name: table[row].clone() for row, entry in self._entries.items() for name in entry.names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`. Nothing is changed unless all of it fits.

        Raises:
            CheckpointError: a layer is missing or unknown, or the history has another length: another model or recipe.
        """
        names = {name for entry in self._entries.values() for name in entry.names}
        for name in sorted(names ^ state.keys()):
            place = "the model" if name in names else "the checkpoint"
            raise CheckpointError(f"scales of another model or recipe: only {place} keeps one for '{name}'.")
        length = 2 + self.history.shape[0]
        for name, saved in state.items():
            if saved.shape != (length,):
                raise CheckpointError(
                    f"scales of another recipe: '{name}' has a history of {saved.numel() - 2} there and "
                    f"{length - 2} here."
                )
        for row, entry in self._entries.items():
            # Layers that share an input have one scale here, which must fit all of them.
            values = torch.stack([state[name] for name in entry.names]).amax(0).to(self.scale_and_amax.device)
            self.scale_and_amax.data[row] = values[:2]
            self.history.data[:, row] = values[2:]

    def save(self, path: str | Path) -> None:
        """Write the scales as a calibration file (JSON), for `octavo.convert(model, "static", scales=path)`.

        Raises:
            ConfigError: no scale is known yet, or the file cannot be written.
        """
        calibration_file.write(Path(path), dict(self._calibrated()))

    def load(self, path: str | Path) -> None:
        """Load the scales of a calibration file; layers that are not in it keep theirs.

        Raises:
            ConfigError: the file is not one, or was made for other formats.
        """
        self.start_from(calibration_file.read(Path(path)))

    def start_from(self, scales: Mapping[str, Calibrated]) -> None:
        """`load`, from the content of a calibration file."""
        for row, entry in self._entries.items():
            found = {name: scales[name] for name in entry.names if name in scales}
            for name, calibrated in found.items():
                calibrated.check(name, entry.operand)
            if found:
                self.scale_and_amax.data[row, 0] = max(calibrated.scale for calibrated in found.values())

    @property
    def has_static(self) -> bool:
        """Whether any of its scales is static, from a calibration file."""
        return any(entry.operand.scale_from == "static" for entry in self._entries.values())

    @property
    def is_known(self) -> bool:
        """Whether any scale is known yet. Waits for the device."""
        return bool((self.scale_and_amax[:, 0] > 0).any())

    def __len__(self) -> int:
        """Return the number of stored scales."""
        return len(self._entries)

    def add(self, layer: StoredScaleLayer) -> None:
        """Note that a layer has a slot of this state: a copied one, which brings it along."""
        layers = vars(self).get("_layers")  # None while a file of an older version is read, which lists them itself
        if layers is not None and all(other() is not layer for other in layers):
            layers.append(ref(layer))

    def __getstate__(self) -> dict[str, Any]:
        # Without model and layers: otherwise a copy of one layer would copy everything. Copied layers add themselves.
        return {**self.__dict__, "_layers": [], "_model": None, "is_held": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layers = [ref(layer) for layer in state["_layers"] if layer is not None]  # in files of older versions
        self._bind()
        _live[next(_numbers)] = self

    def _amax_of_all_ranks(self) -> Tensor:
        amax = self.scale_and_amax.data[:, 1].clone()
        if in_process_group():
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX)
        return amax

    def _calibrated(self, how: str = "", rows: Collection[int] | None = None) -> Iterator[tuple[str, Calibrated]]:
        scale, amax = self.scale_and_amax.unbind(1)
        scales, largest = scale.tolist(), torch.maximum(self.history.amax(0), amax).tolist()
        for row in self._entries if rows is None else rows:
            entry, operand = self._entries[row], self._entries[row].operand
            kept = "as it was loaded" if operand.scale_from == "static" else "the largest values of training"
            origin = Provenance(recipe=entry.recipe.name, how=how or kept)
            for name in entry.names if scales[row] > 0 else ():
                yield name, Calibrated(operand.stored_format, operand.scaling, scales[row], largest[row], origin=origin)

    def _bind(self) -> None:
        """Make the slots views of `scale_and_amax`."""
        for slot in self._slots:
            slot.scale_and_amax = self._of_slot(slot.number)

    def _of_slot(self, number: int) -> Tensor:
        first = number * len(STORED_SCALE_ROLES)
        return self.scale_and_amax[first : first + len(STORED_SCALE_ROLES)]

    def _find_rows(self) -> dict[tuple[Operand, History], Tensor]:
        """Return the rows that each rule updates. Static scales are not updated."""
        rows: dict[tuple[Operand, History], list[int]] = {}
        for row, entry in self._entries.items():
            if entry.operand.scale_from != "static":
                rows.setdefault((entry.operand, entry.recipe.history), []).append(row)
        return {rule: torch.tensor(found, device=self.scale_and_amax.device) for rule, found in rows.items()}


def names_by_input(layers: Mapping[str, StoredScaleLayer]) -> list[tuple[str, ...]]:
    """Return the names of layers grouped by input, which is quantised once, with one scale."""
    groups: dict[int, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(id(layer.shared or layer), []).append(name)
    return list(map(tuple, groups.values()))


_live: WeakValueDictionary[int, ScalingState] = WeakValueDictionary()
"""All states in order of creation: ranks must run their all-reduces in the same order."""
_numbers = itertools.count()


def _stepped(optimizers: Sequence[Optimizer]) -> None:
    """Update the scales of the models that were stepped.

    Not of others: a model that is no longer used waits for the garbage collector, on one rank longer than on another,
    and must not start an all-reduce there.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups] if _live else []
    parameters = [parameter for group in groups for parameter in group["params"]]
    # A step on fake tensors does not update real scales.
    is_fake = any(isinstance(parameter, FakeTensor) for parameter in parameters)
    states = [state for state in _live.values() if isinstance(state.scale_and_amax, FakeTensor) == is_fake]
    stepped = {id(parameter) for parameter in parameters}
    held = [state for state in states if state.belongs_to(stepped)]
    for state in held:
        state.is_held = True
    for state in states:
        if state in held or not (held or state.is_held):
            state._update(are_owned=state.is_held)
        else:
            state.miss_step()


after_outermost_step(_stepped)


def attach_scaling_state(layers: Mapping[str, StoredScaleLayer], model: nn.Module | None = None) -> ScalingState | None:
    """Give layers whose recipe stores scales a slot of one state, and return it; None if none does.

    Args:
        layers: by full name.
        model: the model that they are part of, if known: an optimizer of any of its parameters updates the scales.
    """
    storing = {name: layer for name, layer in layers.items() if layer.recipe.has_stored_scales}
    return ScalingState(storing, model) if storing else None


def scales(model: nn.Module) -> ScalingState | None:
    """Return the scales that a model stores from step to step, None if its recipes store none.

    Layers created one by one (`octavo.nn.Linear(..., recipe="delayed")`) have a `ScalingState` each. These are joined
    here into one, with the names of this model: one update and one all-reduce per step.
    """
    slots: dict[str, Any] = {name: getattr(module, "scaling_slot", None) for name, module in model.named_modules()}
    layers: dict[str, Any] = {n: model.get_submodule(n) for n, slot in slots.items() if isinstance(slot, ScalingSlot)}
    before = {name: (layer.scaling_state, layer.scaling_slot) for name, layer in layers.items()}
    states = {id(state): state for state, _ in before.values()}
    if len(states) < 2:
        return next(iter(states.values()), None)
    joined = ScalingState(layers, model)
    for name, (state, slot) in before.items():
        here, there = _rows_of(layers[name].scaling_slot), _rows_of(slot)
        joined.scale_and_amax.data[here] = state.scale_and_amax[there]
        joined.history.data[: state.history.shape[0], here] = state.history[:, there]
    return joined


def stored_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the scales that a model stores between steps, by name."""
    state = scales(model)
    return {} if state is None else state.state_dict()


def restore_scales(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Load the result of `stored_scales`, also after some layers changed their recipe.

    A scale that was not stored then, or has another history length now, keeps its value.
    """
    state = scales(model)
    if state is None:
        return
    now = state.state_dict()
    fits = {name: tensor for name, tensor in stored.items() if name in now and tensor.shape == now[name].shape}
    state.load_state_dict({**now, **fits})


def _scale_of(amax: Tensor, operand: Operand, margin: int) -> Tensor:
    return scale_from_amax(amax, format_named(operand.format), operand.scaling)[0] * 2.0**margin


def _rows_of(slot: ScalingSlot) -> slice:
    return slice(slot.number * len(STORED_SCALE_ROLES), (slot.number + 1) * len(STORED_SCALE_ROLES))
