"""Linear layers that read the same input, computed as one: q, k and v of an attention, gate and up of an MLP.

A module calls them one after another. Calling the first computes all of them; the outputs of the others are attached to
the input tensor until their layers are called. A layer that finds no output computes alone. The joint computation is
one node of the autograd graph, so that backward gets the gradients of all outputs at once: they are quantised side by
side, and dgrad, whose GEMM sums over the layers, and wgrad are one GEMM each.

An output is dropped if x, its weight or the recipe has changed since, as seen by versions and optimizer steps. A write
through `weight.data` between two calls of one group with the same tensor is not seen.

One node means one backward: `q.sum().backward()` followed by `k.sum().backward()` needs `retain_graph=True` in the
first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo._util.compiler import traced_version
from octavo.kernels.quant_spec import spec_of
from octavo.nn.attached_codes import attached_codes
from octavo.nn.functional import Quantizer, compute_dtype, linears
from octavo.nn.telemetry_ops import stats_buffer_of
from octavo.nn.weight_codes import WeightCodes
from octavo.numerics import Quantized

if TYPE_CHECKING:
    from octavo.nn.linear import Linear


_NAME = "_octavo_outputs"


class Waiting:
    """Outputs of groups for one tensor that no layer has asked for yet. Copies and files of the tensor have none."""

    def __init__(self) -> None:
        self.by_group: dict[SharedInput, dict[int, tuple[Tensor, tuple[Any, ...]]]] = {}
        """Per group: output, and the state that it was computed in, by the position of its layer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # `torch.load` accepts this type


_this_thread = threading.local()


def _drop_others(waiting: Waiting) -> None:
    """Drop outputs attached to the last tensor: after a failed forward they would keep its graph alive."""
    last = getattr(_this_thread, "last", lambda: None)()
    if last is not None and last is not waiting:
        last.by_group.clear()
    _this_thread.last = weakref.ref(waiting)


class SharedInput:
    """A group of layers, referred to by each of them as `layer.shared`.

    It does not keep them alive, nor do copies and files of one layer carry the others: a copied layer takes its place
    in the copy of its group (`take_place`), which thus has those layers that were copied together.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._members: list[weakref.ref[Linear] | None] = [weakref.ref(layer) for layer in layers]

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The layers, in order of the stack of their weights."""
        return tuple(layer for layer in self._at() if layer is not None)

    def _at(self) -> list[Linear | None]:
        """Return the layer at each place, None where there is none any more."""
        return [None if member is None else member() for member in self._members]

    def place_of(self, layer: Linear) -> int | None:
        """Return the place of a layer, None if it is not of this group."""
        return next((place for place, member in enumerate(self._at()) if member is layer), None)

    def take_place(self, layer: Linear, place: int) -> None:
        """Add a layer at an empty place; a shallow copy of a member finds it taken, and computes alone."""
        if self._at()[place] is None:
            self._members[place] = weakref.ref(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {"places": len(self._members)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a group without layers; files of older versions have them."""
        older = [weakref.ref(layer) for layer in state.get("layers", ())]
        self._members = [*older] or [None] * state["places"]

    def output(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the output of one layer for x; a call of the first computes those of all.

        If a forward pre-hook, or a forward of its own, provides the weight of a layer, as in DeepSpeed's ZeRO-3 and the
        offloading of accelerate, that layer computes alone. So does every layer for an inference tensor, which has no
        version.
        """
        members = {i: m for i, m in enumerate(self._at()) if m is not None and self._joins(m, layer)}
        position = next((i for i, member in members.items() if member is layer), None)
        # None: such a layer, or a copy of a member, such as a replica on another device.
        if position is None or _has_no_version(x, layer.weight):
            return self._compute([layer], x)[0]
        outputs = self._outputs_on(x)
        if position == next(iter(members)):
            computed = self._compute(list(members.values()), x)
            outputs.clear()
            outputs.update({i: (y, _state(m, x)) for (i, m), y in zip(members.items(), computed, strict=True)})
        y, state = outputs.pop(position, (None, None))
        return y if y is not None and state == _state(layer, x) else self._compute([layer], x)[0]

    def _joins(self, layer: Linear, other: Linear) -> bool:
        """Return whether a layer is computed together with another one of its group."""
        if getattr(layer, "shared", None) is not self:  # reverted or converted by itself since
            return False
        return layer.enabled and layer.recipe is other.recipe and not brings_weight(layer)

    def _outputs_on(self, x: Tensor) -> dict[int, tuple[Tensor, tuple[Any, ...]]]:
        waiting = getattr(x, _NAME, None)
        if not isinstance(waiting, Waiting):
            waiting = Waiting()
            setattr(x, _NAME, waiting)
        if not torch.compiler.is_compiling():
            _drop_others(waiting)
        return waiting.by_group.setdefault(self, {})

    def _compute(self, layers: Sequence[Linear], x: Tensor) -> list[Tensor]:
        return linears(x, [layer.matrix for layer in layers], [layer.bias for layer in layers], *settings_of(layers, x))


def brings_weight(layer: nn.Module) -> bool:
    """Return whether the weight of a layer may exist in its own call only, so that it is computed alone."""
    # The first two are DeepSpeed's ZeRO-3 and the offloading of accelerate, the last a weight that is computed.
    return bool(layer._forward_pre_hooks) or "forward" in vars(layer) or "parametrizations" in layer._modules


def settings_of(layers: Sequence[Linear], x: Tensor) -> tuple[Quantizer, Quantized | None, WeightCodes | None]:
    """Return how layers that are computed together quantise, and the codes that exist: of x, and of their weights."""
    first = layers[0]
    recipe, slot = first.recipe, first.scaling_slot
    scales = None if slot is None else slot.scale_and_amax
    quantizer = Quantizer(recipe, compute_dtype(x), scales, stats_buffer_of(layers), first.keeps_input)
    return quantizer, attached_codes(x, spec_of(recipe.fprop.input)), first.weight_codes


def _has_no_version(*tensors: Tensor) -> bool:
    return not torch.compiler.is_compiling() and any(tensor.is_inference() for tensor in tensors)


_steps = 0
"""Number of optimizer steps: fused optimizers write weights without incrementing their version."""


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def _state(layer: Linear, x: Tensor) -> tuple[Any, ...]:
    """Return a key of everything, besides the identity of x, that the output of a layer depends on."""
    modes = (compute_dtype(x), torch.is_grad_enabled(), x.requires_grad)
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    if torch.compiler.is_compiling():
        return *modes, *map(traced_version, (x, *parameters))
    versions = (tensor._version for tensor in (x, *parameters))
    return *modes, _steps, id(layer.recipe), *((p.data_ptr(), p.shape) for p in parameters), *versions
