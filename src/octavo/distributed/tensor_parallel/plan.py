"""Tensor-parallel plan of a model: how each layer is sharded, what is sent for it, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch import nn

from octavo._util.terminal import columns
from octavo.kernels import QuantSpec
from octavo.nn import Linear
from octavo.nn.functional import spec_of
from octavo.recipes import reused_from


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """Sharding of one layer."""

    name: str
    shape: tuple[int, int]
    """Shape of the whole weight, (N, K)."""
    cut: str
    """`columns`: column-parallel, each rank has some of the N outputs; `rows`: row-parallel, some of the K inputs."""
    sent: str
    """Format of the tokens gathered before a column-parallel layer, or of the sums after a row-parallel one."""
    reason: str
    """Reason why the input of a column-parallel layer is not sent as codes; else empty."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """Sharding of a model's layers. `print(plan)` shows it as a table."""

    ranks: int
    sequence: bool
    """Sequence parallel: tokens are sharded where features are not."""
    layers: tuple[LayerPlan, ...]

    def to_json(self) -> str:
        """Return the plan as JSON."""
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"ranks": self.ranks, "sequence": self.sequence, "layers": layers}, indent=1)

    def __str__(self) -> str:
        table = [("layer", "weight", "cut by", "sent as", "why")]
        table += [(x.name, " x ".join(map(str, x.shape)), x.cut, x.sent, x.reason) for x in self.layers]
        return "\n".join([*columns(table), f"on {self.ranks} ranks"])


def codes_or_reason(layer: nn.Module) -> QuantSpec | str:
    """Return the codes in which the input of a column-parallel layer is gathered, or why its values are gathered."""
    if not isinstance(layer, Linear):
        return "the layer runs in BF16"
    recipe, forward = layer.recipe, layer.recipe.fprop.input
    if not recipe.fprop.is_fp8:
        return "fprop runs in BF16"
    if not recipe.wgrad.is_fp8:
        return "wgrad runs in BF16: it reads the values"
    if forward.tile.rows is None:
        return "a per-tensor scale needs the amax of all ranks' tokens"
    if reused_from(recipe, "wgrad", "input") is None:
        return "fprop and wgrad read different codes: two one-byte copies are as large as BF16"
    if forward.rounding != "nearest":
        return "its rounding is stochastic"
    if layer.keeps_input:
        return "it saves its input unquantised (requantise)"
    return spec_of(forward)
