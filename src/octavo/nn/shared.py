"""Linear layers that read the same input, computed as one: q, k and v of an attention, gate and up of an MLP.

A module calls them one after another. Calling the first computes all of them; the outputs of the others are attached to
the input tensor until their layers are called. A layer that finds no output computes alone. The joint computation is
one node of the autograd graph, so that backward gets the gradients of all outputs at once: they are quantised side by
side, and dgrad, whose GEMM sums over the layers, and wgrad are one GEMM each.

An output is dropped if x, its parameters or the recipe has changed since. That x has not been written to is proved
(`octavo.nn.seal.Unwritten`). Parameters are compared on a CPU. On a GPU their versions and optimizer steps are: a write
through `weight.data` between two calls of one group with the same tensor is not seen there.

Some tiles of scales span the weights of several layers: a scale per tensor is that of the whole stack. Such a layer has
the scales of the stack, whichever of its layers are computed: the scale of q does not depend on whether k has a hook,
is disabled, reverted or has a recipe of its own. So training, evaluation and export compute the same function.

One node means one backward: `q.sum().backward()` followed by `k.sum().backward()` needs `retain_graph=True` in the
first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.errors import UnsupportedError
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import PLAIN
from octavo.nn.attached_codes import InputCodes, attached_input
from octavo.nn.fp8_weights import has_fp8_weight
from octavo.nn.functional import Quantizer, compute_dtype, linears
from octavo.nn.seal import Unwritten
from octavo.nn.telemetry_ops import stats_buffer_of
from octavo.nn.weight_codes import WeightCodes, quantize_weights
from octavo.tensor import is_distributed

if TYPE_CHECKING:
    from octavo.nn.linear import LinearLayer as Linear


PENDING = "_octavo_outputs"


class PendingOutput(NamedTuple):
    """The output of a layer that has not been called yet, and what it was computed from."""

    output: Tensor
    state: tuple[Any, ...]
    input: Unwritten
    parameters: Unwritten
    """On a CPU; elsewhere versions in `state` stand for them."""

    def is_of(self, layer: Linear, x: Tensor) -> bool:
        """Return whether the layer would compute the same from x now."""
        if self.state != _state(layer, x):
            return False
        return self.input.holds(x) and self.parameters.holds(*_on_cpu(layer))


class PendingOutputs:
    """Outputs of groups for one tensor that no layer has asked for yet. Copies and files of the tensor have none."""

    def __init__(self) -> None:
        self.by_group: dict[SharedInput, dict[Any, Any]] = {}
        """Per group: a `PendingOutput` by the position of its layer."""
        self.traced: dict[int, tuple[Tensor, str, Any]] = {}
        """In compiled code: output, `call_key` and state, by the `id` of its layer (`octavo.nn.traced`)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # `torch.load` accepts this type


_this_thread = threading.local()


def _drop_others(waiting: PendingOutputs) -> None:
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
        self._rows: list[int] | None = [layer.out_features for layer in layers]
        self._largest: list[Tensor | None] = [None] * len(self._members)

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The layers, in order of the stack of their weights."""
        return tuple(layer for layer in self.at() if layer is not None)

    def at(self) -> list[Linear | None]:
        """Return the layer at each place, None where there is none any more."""
        return [None if member is None else member() for member in self._members]

    def place_of(self, layer: Linear) -> int | None:
        """Return the place of a layer, None if it is not of this group."""
        return next((place for place, member in enumerate(self.at()) if member is layer), None)

    def take_place(self, layer: Linear, place: int) -> None:
        """Add a layer at an empty place; a shallow copy of a member finds it taken, and computes alone."""
        if self.at()[place] is None:
            self._members[place] = weakref.ref(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "largest": self._largest_now()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a group without layers; files of older versions have them."""
        older = state.get("layers", ())
        self._rows = state.get("rows")
        self._members = [weakref.ref(layer) for layer in older] or [None] * len(state["rows"])
        self._largest = state.get("largest") or [None] * len(self._members)

    @property
    def rows(self) -> list[int]:
        """Output features of each layer."""
        if self._rows is None:  # from a file of an older version, in which the layers come after their group
            self._rows = [0 if m is None else m.out_features for m in self.at()]
        return self._rows

    def _largest_now(self) -> list[Tensor | None]:
        """Return the largest magnitude of each weight, FP32 on the CPU; None if no scale of a stack needs it.

        It stands for a weight that is not copied with the others.
        """
        largest = list(self._largest)
        for place, member in enumerate(self.at()):
            weight = None if member is None else member._parameters.get("weight")
            if weight is None or type(weight) not in PLAIN or weight.is_meta or not weight.numel():
                continue
            recipe = getattr(member, "recipe", None)
            if recipe is not None and recipe.fprop.is_fp8 and recipe.fprop.weight.tile.rows is None:
                largest[place] = weight.detach().abs().amax().float().cpu()
        return largest

    def output(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the output of one layer for x; a call of the first computes those of all.

        If a forward pre-hook, or a forward of its own, provides the weight of a layer, as in DeepSpeed's ZeRO-3 and the
        offloading of accelerate, that layer computes alone. So does one whose weight is an inference tensor, which has
        no version.

        Raises:
            UnsupportedError: the layer has scales of the stack, and the weight of another layer is not here.
        """
        if torch.compiler.is_compiling():  # what `nn.traced` leaves to eager code, to raise
            return compute_together([layer], x)[0]
        members = {i: m for i, m in enumerate(self.at()) if m is not None and joins(self, m, layer)}
        position = next((i for i, member in members.items() if member is layer), None)
        # None: such a layer, or a copy of a member, such as a replica on another device.
        if position is None or _has_no_version(layer.weight):
            return compute_together([layer], x)[0]
        outputs = self._outputs_on(x)
        if position == next(iter(members)):
            outputs.update(self._compute_all(members, x))
        pending = outputs.pop(position, None)
        if pending is None:
            return compute_together([layer], x)[0]
        y = pending.output if pending.is_of(layer, x) else compute_together([layer], x)[0]
        if not outputs:
            pending.input.lift()
        return y

    def _compute_all(self, members: Mapping[int, Linear], x: Tensor) -> dict[int, PendingOutput]:
        """Return the outputs of these layers, by position, with the proof of what they were computed from."""
        computed = compute_together(list(members.values()), x)
        x_now = Unwritten.of(x)
        if not x_now.is_provable and len(members) > 1:
            ledger.fall_back(
                "layers that share an input were computed one by one: a write to the input between them cannot be seen,"
                f" since {type(x).__name__} {tuple(x.shape)} is not in memory of PyTorch's, or saved tensors have hooks"
            )
        return {
            i: PendingOutput(y, _state(member, x), x_now, Unwritten.of(*_on_cpu(member)))
            for (i, member), y in zip(members.items(), computed, strict=True)
        }

    def _outputs_on(self, x: Tensor) -> dict[int, PendingOutput]:
        waiting = getattr(x, PENDING, None)
        if not isinstance(waiting, PendingOutputs):
            waiting = PendingOutputs()
            setattr(x, PENDING, waiting)
        _drop_others(waiting)
        return waiting.by_group.setdefault(self, {})

    def lends_scales(self, layers: Sequence[Linear]) -> bool:
        """Return whether these layers have scales in common with other layers of the group."""
        recipe = layers[0].recipe
        if len(layers) == len(self._members) or not recipe.fprop.is_fp8:
            return False
        height = recipe.fprop.weight.tile.rows
        are_whole = height is not None and not any(rows % height for rows in self.rows[:-1])
        return not are_whole and not has_fp8_weight([layer.weight for layer in layers])

    def stack_with(self, layers: Sequence[Linear], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights (N_i, K) of all layers of the group, for these layers the given ones.

        Raises:
            UnsupportedError: one is not here: replaced, not copied, partitioned, offloaded, or on another device.
        """
        stack: list[Tensor | None] = [None if m is None else _matrix_of(m).detach() for m in self.at()]
        for place, weight in zip(self.places_of(layers), weights, strict=True):
            stack[place] = weight
        is_by_tensor = layers[0].recipe.fprop.weight.tile.rows is None
        for place, (rows, part) in enumerate(zip(self.rows, stack, strict=True)):
            if part is None and is_by_tensor and (row := self._stand_in(place, weights[0])) is not None:
                stack[place] = row
                continue
            if part is None or part.device != weights[0].device or part.shape != (rows, weights[0].shape[1]):
                where = "gone" if part is None else f"{tuple(part.shape)} on {part.device}"
                raise UnsupportedError(_absent(layers[0], weights[0], where))
            if is_distributed(part):
                raise UnsupportedError(_absent(layers[0], weights[0], "a DTensor"))
        return cast(list[Tensor], stack)

    def _stand_in(self, place: int, like: Tensor) -> Tensor | None:
        """Return a row (1, K) that gives a stack the scale that it has with the weight at a place, if that is known."""
        largest = self._largest[place]
        return None if largest is None else F.pad(largest.to(like).reshape(1, 1), (0, like.shape[1] - 1))

    def places_of(self, layers: Sequence[Linear]) -> list[int]:
        """Return the places of layers, or of the layers that they are shallow copies of.

        Raises:
            UnsupportedError: a copy has another weight.
        """
        weights = [None if m is None else m._parameters.get("weight") for m in self.at()]
        places = [self.place_of(layer) for layer in layers]
        for i, layer in enumerate(layers):
            if places[i] is None:
                mine = layer._parameters.get("weight")
                places[i] = next((place for place, w in enumerate(weights) if w is not None and w is mine), None)
            if places[i] is None:
                raise UnsupportedError(_absent(layer, layer.matrix, "that of the layer which this one is a copy of"))
        return cast(list[int], places)


def joins(group: SharedInput, layer: Linear, other: Linear) -> bool:
    """Return whether a layer is computed together with another one of its group."""
    if getattr(layer, "shared", None) is not group:  # reverted or converted by itself since
        return False
    return layer.enabled and layer.recipe.plan.key == other.recipe.plan.key and not brings_weight(layer)


def compute_together(layers: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """Return the outputs of layers for x. They are of one group and recipe; or it is one layer."""
    quantizer, x_codes, w_codes = settings_of(layers, x)
    weights, biases = [layer.matrix for layer in layers], [layer.bias for layer in layers]
    group = layers[0].shared
    if group is None or not group.lends_scales(layers):
        return linears(x, weights, biases, quantizer, x_codes, w_codes)
    if w_codes is None:
        w_codes = quantize_together(layers, weights)
    if w_codes is not None:
        return linears(x, weights, biases, quantizer, x_codes, w_codes)
    # A tile of scales spans one of these layers and another: all are computed, with the other's output dropped.
    stack = group.stack_with(layers, weights)
    outputs = linears(x, stack, [None] * len(stack), quantizer._replace(stats_buffer=None), x_codes)
    ys = [outputs[place] for place in group.places_of(layers)]
    return [y if bias is None else y + bias.to(y.dtype) for y, bias in zip(ys, biases, strict=True)]


def quantize_together(layers: Sequence[Linear], weights: Sequence[Tensor]) -> WeightCodes | None:
    """Return weights as fprop reads them, with the scales of the stack of their group, whatever of it is computed.

    None if a tile of scales spans one of these layers and one that is not among them.

    Args:
        layers: of one recipe and one group, or one layer.
        weights: their weights, (N_i, K).

    Raises:
        UnsupportedError: see `SharedInput.stack_with`.
    """
    group, plan = layers[0].shared, layers[0].recipe.plan
    assert plan.w is not None
    if group is None or not group.lends_scales(layers):
        return quantize_weights(weights, plan.w, plan.w_second, keeps_second=True)
    parts = quantize_weights(group.stack_with(layers, weights), plan.w).parts()
    if parts is None:
        return None
    places = group.places_of(layers)
    return WeightCodes(tuple([parts[place] for place in places]), tuple([weight.shape[0] for weight in weights]))


def _matrix_of(member: nn.Module) -> Tensor:
    """Return the weight (N, K) of a member, which may have been reverted since: `Conv1D` of transformers has (K, N)."""
    if isinstance(member, nn.Linear):
        return cast(Tensor, getattr(member, "matrix", member.weight))
    return cast(Tensor, member.weight).t()


def _absent(layer: Linear, weight: Tensor, which: str) -> str:
    return (
        f"a layer with a weight {tuple(weight.shape)} and recipe '{layer.recipe.name}' has scales in common with the "
        f"layers that read the same input, and a weight of theirs is not here ({which}): it was replaced or "
        "not copied, or is partitioned or offloaded. Call octavo.convert again, or convert with Policy(fuse=False), or "
        "take a recipe with a scale per row, such as 'folded'."
    )


def brings_weight(layer: nn.Module) -> bool:
    """Return whether the weight of a layer may exist in its own call only, so that it is computed alone."""
    # The first two are DeepSpeed's ZeRO-3 and the offloading of accelerate, the last a weight that is computed.
    return bool(layer._forward_pre_hooks) or "forward" in vars(layer) or "parametrizations" in layer._modules


def settings_of(layers: Sequence[Linear], x: Tensor) -> tuple[Quantizer, InputCodes | None, WeightCodes | None]:
    """Return how layers that are computed together quantise, and the codes that exist: of x, and of their weights."""
    first = layers[0]
    recipe, slot = first.recipe, first.scaling_slot
    scales = None if slot is None else slot.scale_and_amax
    if slot is not None and first.scaling_state is not None and torch.is_grad_enabled():
        first.scaling_state.note_forward(slot, first)
    quantizer = Quantizer(recipe, compute_dtype(x), scales, stats_buffer_of(layers), first.keeps_input)
    return quantizer, attached_input(x, recipe), first.weight_codes


def _on_cpu(layer: Linear) -> list[Tensor]:
    """Return the parameters of a layer whose values can be compared: plain ones on a CPU."""
    return [p for p in (layer.weight, layer.bias) if p is not None and p.device.type == "cpu" and type(p) in PLAIN]


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
    versions = (parameter._version for parameter in parameters)
    return *modes, _steps, id(layer.recipe), *((p.data_ptr(), p.shape) for p in parameters), *versions
