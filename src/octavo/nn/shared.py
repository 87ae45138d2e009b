"""Linear layers that read the same input, computed as one: q, k and v of an attention, gate and up of an MLP.

A module calls them one after another. The first call computes all of them, and the others are handed what is theirs.
Whether they do read the same input is seen in each call, by identity: a layer called with another tensor computes
alone. The joint call has one node in the autograd graph, so that backward has the gradients of all outputs at once:
they are quantised side by side, and dgrad, whose sum over the layers the GEMM makes, and wgrad are one GEMM each.

Outputs wait for their layer until its next call. Those of an earlier x, weight or recipe are dropped, which versions
and optimizer steps tell: not a write through `weight.data` between two calls of one group with the same tensor.

One node means one backward: `q.sum().backward()` and then `k.sum().backward()` needs `retain_graph=True` in the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.nn.attached_codes import attached_codes
from octavo.nn.functional import Quantizer, compute_dtype, linears, spec_of
from octavo.nn.telemetry_ops import stats_buffer_of
from octavo.recipes import Recipe

if TYPE_CHECKING:
    from octavo.nn.linear import Linear


class SharedInput:
    """A group of layers, held by each of them as `layer.shared`."""

    layers: tuple[Linear, ...]
    _input: Tensor | None
    _waiting: dict[int, Tensor]
    """Outputs for that input that nobody has asked for yet, by the place of their layer."""
    _states: dict[int, tuple[Any, ...]]

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self._clear()

    def output(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the output of one layer for x, and compute those of the others if x is new."""
        found = [i for i, member in enumerate(self.layers) if member is layer]
        # Not found: a copy of a member, such as a replica on another device. A hook before a forward may bring the
        # weight along, as DeepSpeed's ZeRO-3 does: it is there for that layer, and while it computes.
        if not found or layer._forward_pre_hooks:
            return self._compute([layer], x)[0]
        position = found[0]
        if position not in self._waiting:
            self._compute_all(layer.recipe, x)
        y, state, same = self._waiting.pop(position), self._states[position], self._input is x
        if not self._waiting:
            self._clear()
        return y if same and state == _state(layer, x) else self._compute([layer], x)[0]

    def _compute_all(self, recipe: Recipe, x: Tensor) -> None:
        alike = [layer.enabled and layer.recipe is recipe and not layer._forward_pre_hooks for layer in self.layers]
        members = [i for i, joins in enumerate(alike) if joins]
        outputs = self._compute([self.layers[i] for i in members], x)
        self._input, self._waiting = x, dict(zip(members, outputs, strict=True))
        self._states = {i: _state(self.layers[i], x) for i in members}

    def _compute(self, layers: Sequence[Linear], x: Tensor) -> list[Tensor]:
        recipe = layers[0].recipe
        given = attached_codes(x, spec_of(recipe.fprop.input))
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        codes = layers[0].weight_codes if len(layers) == len(self.layers) else None
        keeps = all(layer.keeps_input for layer in layers)
        scales = None if layers[0].scaling_slot is None else layers[0].scaling_slot.cells
        return linears(
            x,
            weights,
            biases,
            Quantizer(recipe, compute_dtype(x), scales, stats_buffer_of(layers), keeps),
            given,
            codes,
        )

    def _clear(self) -> None:
        self._input, self._waiting, self._states = None, {}, {}

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers}  # copies and files carry no activations

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layers = state["layers"]
        self._clear()


_steps = 0
"""Optimizer steps so far: fused optimizers write weights without counting a version."""


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def _state(layer: Linear, x: Tensor) -> tuple[Any, ...]:
    """Return what the output of a layer depends on beside the identity of x; another, by ==, once that has changed."""
    modes = (compute_dtype(x), torch.is_grad_enabled(), x.requires_grad)
    if torch.compiler.is_compiling():  # compiled code has no versions: it is traced anew
        return modes
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    versions = (None if tensor.is_inference() else tensor._version for tensor in (x, *parameters))
    return *modes, _steps, id(layer.recipe), *((p.data_ptr(), p.shape) for p in parameters), *versions
