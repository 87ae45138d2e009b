"""Linear layers that read the same input, computed as one: q, k and v of an attention, gate and up of an MLP.

A module calls them one after another. The first call computes all of them, and the others are handed what is theirs.
Whether they do read the same input is seen in each call, by identity: a layer called with another tensor computes
alone. The joint call has one node in the autograd graph, so that backward has the gradients of all outputs at once:
they are quantised side by side, and dgrad, whose sum over the layers the GEMM makes, and wgrad are one GEMM each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.nn.functional import linears

if TYPE_CHECKING:
    from octavo.nn.linear import Linear


class SharedInput:
    """A group of layers, held by each of them as `layer.shared`."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self.layers = tuple(layers)
        self._input: Tensor | None = None
        self._version: int | None = None
        self._waiting: dict[int, Tensor] = {}

    def output(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the output of one layer for x, and compute those of the others if x is new."""
        position = self.layers.index(layer)
        if self._input is not x or self._version != _version(x) or position not in self._waiting:
            self._compute(x)
        y = self._waiting.pop(position)
        if not self._waiting:
            self._input = None
        return y

    def _compute(self, x: Tensor) -> None:
        from octavo.nn.linear import compute_dtype

        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        outputs = linears(x, weights, biases, self.layers[0].recipe, compute_dtype(x))
        self._input, self._version, self._waiting = x, _version(x), dict(enumerate(outputs))


def _version(x: Tensor) -> int | None:
    """Return what tells an input from itself after a change in place. Compiled code has none: it is traced anew."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version
