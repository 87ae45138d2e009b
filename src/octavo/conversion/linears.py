"""Subclasses of `nn.Linear` with a `forward` of their own that computes a linear layer, recognised by their results.

Many models have one: it casts the weight to the dtype of its input, as nanochat's, or is written as `x @ W.T`. A copy
with a tiny weight is run and compared with the formula; then copies as wide as the layer. One that scales, clips, adds
an update, quantises or computes in another precision stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.linear import RecognisedLinear, has_forward_of_linear
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, random_tensor, shallow_copy
from octavo.nn.side_effects import Conduct

_ROWS, _IN, _OUT = 8, 8, 24
_PLAIN = Conduct(products=1)
_EVERYWHERE = Conduct(products=1, shapes=((0,), (5,), (1, 1), (2, 3, 2)), in_bf16=True, under_autocast=True)


def find_own_forwards(layers: Iterable[nn.Module]) -> set[int]:
    """Return the `id` of each `nn.Linear` with a `forward` of its own that does not compute a linear layer alone."""
    is_linear = judge_once(computes_linear)
    linears = [layer for layer in layers if isinstance(layer, nn.Linear) and not has_forward_of_linear(layer)]
    return {id(layer) for layer in linears if not is_linear(layer)}


def computes_linear(layer: nn.Module) -> bool:
    """Return whether the `forward` of a subclass of `nn.Linear` is that of a linear layer, and nothing else."""
    if isinstance(layer, RecognisedLinear) and layer.is_as_recognised():
        return True
    assert isinstance(layer, nn.Linear)
    tensors = [name for named in (layer.named_parameters(), layer.named_buffers()) for name, _ in named]
    if sorted(tensors) not in (["weight"], ["bias", "weight"]) or not is_as_its_class(layer):
        return False
    if not _gives_linear(layer, (_IN, _OUT), 1e-5, CALLS, _EVERYWHERE):
        return False
    wide = (layer.in_features, _OUT), (_IN, layer.out_features)
    return all(_gives_linear(layer, widths, 1e-4, 1, _PLAIN) for widths in wide)


def _gives_linear(layer: nn.Linear, widths: tuple[int, int], tolerance: float, calls: int, conduct: Conduct) -> bool:
    """Return whether a copy of these widths, in and out, computes a linear layer. Long sums need a larger tolerance."""

    def draw(*shape: int) -> Tensor:
        scale = torch.tensor([1e-2, 1.0, 1.0, 1e3], device="cpu", dtype=torch.float32).repeat(_ROWS // 4)[:, None]
        return random_tensor(0, *shape, widths[0]) if shape else random_tensor(0, _ROWS, widths[0]) * scale

    def make(training: bool) -> nn.Module:
        return _random_copy(layer, training, widths)

    return computes(make, _formula, draw, tolerance, calls, conduct)


def _random_copy(layer: nn.Linear, training: bool, widths: tuple[int, int]) -> nn.Module:
    """Return a copy of a layer with random parameters, of these widths: in and out."""
    probe = shallow_copy(layer, training)
    vars(probe).update(in_features=widths[0], out_features=widths[1])
    probe._parameters = {"weight": nn.Parameter(random_tensor(1, *widths[::-1])), "bias": None}
    if layer.bias is not None:
        probe._parameters["bias"] = nn.Parameter(random_tensor(2, widths[1]))
    return probe


def _formula(probe: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, probe.get_parameter("weight"), probe._parameters["bias"])
