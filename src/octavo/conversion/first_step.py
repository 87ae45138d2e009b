"""After the first optimizer step: a warning of layers that are in FP8 by the plan and were multiplied by elsewhere.

A module may read the weight of a layer and never call it, in code that `octavo.conversion.unfit` cannot read: a kernel,
another library's wrapper. Then the weight has a gradient, and no FP8 layer has run. `octavo doctor` has the same line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from torch import nn

from octavo._util.optimizer_steps import after_outermost_step
from octavo._util.terminal import quantity
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn.first_call import CallNotes

_SHOWN = 4
"""Number of names in a warning."""


_WAITING: WeakKeyDictionary[nn.Module, CallNotes] = WeakKeyDictionary()
"""Models that have not been trained since their conversion."""


def watch_first_step(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Warn after the first optimizer step of a model about those of its FP8 layers that something else multiplied by.

    Nothing is said where code was compiled meanwhile: it is traced once for many layers.
    """
    _WAITING[model] = CallNotes(layers)


def _after_step(_: object) -> None:
    for model, notes in [*_WAITING.items()]:
        if not notes.is_traced and len(notes.uncalled) == len(notes.layers):
            continue  # another model's step
        if not notes.is_traced:
            _warn(model, notes)
        del _WAITING[model]


after_outermost_step(_after_step)


def _warn(model: nn.Module, notes: CallNotes) -> None:
    names = list(_read_elsewhere(model, {id(layer) for layer in notes.uncalled}))
    if names:
        listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        warn_once(
            f"{quantity(len(names), 'layer')} planned in FP8 did not run in FP8 in the first step: {listed}. The code "
            "around them reads their weight and multiplies by it itself, in high precision. Policy(keep=[...]) with "
            "their names makes the plan say so"
        )


def _read_elsewhere(model: nn.Module, uncalled: set[int]) -> Iterator[str]:
    """Yield the names of enabled layers that were not called, and whose weight something else has used.

    It has a gradient; or it is frozen, and a parameter beside it has one, as in an adapter around the layer.
    """
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for name, module in model.named_modules():
        if id(module) not in uncalled or not getattr(module, "enabled", True):
            continue
        weight = module._parameters.get("weight")
        frozen = weight is not None and not weight.requires_grad
        beside = parents.get(id(module), module).parameters() if frozen else [weight]
        if any(parameter is not None and parameter.grad is not None for parameter in beside):
            yield name
