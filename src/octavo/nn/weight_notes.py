"""Notes on the weights of layers: that a layer adds an update to it, or that it stays in high precision.

A note is an attribute of the layer, so that copies of the layer have it, and it holds whichever tensor is the weight:
`deepcopy`, `load_state_dict(assign=True)`, `to()` with swapped tensors and plain assignment put another one there.
Functions that are given a tensor alone ask the notes of all living layers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util.compiler import assume_constant_result


class WeightNotes:
    """The notes of one kind. Create it once, at module level.

    Args:
        attribute: name of the attribute of layers that holds the note, and of weights in compiled code.
    """

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute
        self._living: dict[int, weakref.ref[_Note]] = {}
        _KINDS[attribute] = self

    def put(self, layer: nn.Module, text: str | None) -> None:
        """Note a text on the weight of a layer; None removes the note."""
        if (before := vars(layer).pop(self.attribute, None)) is not None:
            self._living.pop(id(before), None)  # something else may hold it
            if before.weight is not None:
                vars(before.weight).pop(self.attribute, None)
        if text is not None:
            vars(layer)[self.attribute] = _Note(self.attribute, layer, text)

    def of(self, weight: Tensor) -> str | None:
        """Return the note on a weight, or on the one whose memory this tensor shares; None if there is none."""
        if torch.compiler.is_compiling():
            _write(self.attribute)
            text: str | None = getattr(weight, self.attribute, None)
            return text
        return next((note.text for note in self.living() if _is_same(weight, note.weight)), None)

    def add(self, note: _Note) -> None:
        """Let a note be found for as long as it exists."""
        key, living = id(note), self._living
        living[key] = weakref.ref(note, lambda _: living.pop(key, None))

    def living(self) -> list[_Note]:
        """Return the notes of this kind on layers that exist."""
        return [note for reference in [*self._living.values()] if (note := reference()) is not None]


_KINDS: dict[str, WeightNotes] = {}


class _Note:
    """A note on the weight of a layer, which holds it. A copy is a note on the copy of the layer."""

    def __init__(self, kind: str, layer: nn.Module, text: str) -> None:
        self.kind, self.text = kind, text
        self._layer = weakref.ref(layer)  # a cycle would keep weights in memory
        _KINDS[kind].add(self)

    @property
    def weight(self) -> Tensor | None:
        """The layer's weight."""
        layer = self._layer()
        return None if layer is None else vars(layer).get("_parameters", {}).get("weight")

    def __reduce__(self) -> tuple[Any, ...]:
        return _Note, (self.kind, self._layer(), self.text)


def _is_same(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether x is a weight, or a view that begins where it does, such as `weight.data`."""
    if x is weight or weight is None:
        return x is weight
    is_plain = all(type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in (x, weight))
    return is_plain and x.dtype == weight.dtype and x.data_ptr() == weight.data_ptr() != 0


@assume_constant_result
def _write(kind: str) -> None:
    """Write notes on the tensors that are weights now: while Dynamo traces, it can tell no tensor from another."""
    for note in _KINDS[kind].living():
        if note.weight is not None:
            setattr(note.weight, kind, note.text)
