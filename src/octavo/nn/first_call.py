"""Whether the layers of a model have been called since they were converted: a layer that is read instead runs no FP8.

A note is an attribute of a layer that its first call removes; in compiled code, which is traced once for many layers,
no layer is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from octavo._util.compiler import assume_constant_result

AWAITS_CALL = "awaits_call"
"""Attribute of a layer that has not been called yet."""


class CallNotes:
    """Notes on layers, from `await_calls` on."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self.is_traced = False
        """Whether code with layers in FP8, these or others, has been compiled meanwhile: then nothing can be told."""
        for layer in self.layers:
            vars(layer)[AWAITS_CALL] = True
        _OPEN.add(self)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that exist."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    @property
    def uncalled(self) -> list[nn.Module]:
        """Those that have not been called."""
        return [layer for layer in self.layers if AWAITS_CALL in vars(layer)]


_OPEN: weakref.WeakSet[CallNotes] = weakref.WeakSet()
"""The notes that somebody still asks."""


def note_calls(layers: Iterable[object]) -> None:
    """Note that layers compute, by their call or as a part of a fused module."""
    if torch.compiler.is_compiling():
        note_traced()
        return
    for layer in layers:
        vars(layer).pop(AWAITS_CALL, None)


def note_weight(weight: torch.Tensor) -> None:
    """Note that the layer of a weight computes by a function of Octavo's that is given the weight alone."""
    if not torch.compiler.is_compiling():
        layers = [layer for notes in _OPEN for layer in notes.uncalled]
        note_calls(layer for layer in layers if layer._parameters.get("weight") is weight)


@assume_constant_result
def note_traced() -> None:
    """Note that code was compiled; the compiler runs this when it traces, as does what it asks (`ask_tracer`)."""
    for notes in _OPEN:
        notes.is_traced = True
