"""What tensor parallel cuts, what it sends for each layer, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch import nn

from octavo.kernels import Target
from octavo.nn import Linear
from octavo.nn.functional import target_of
from octavo.recipes import reused_from


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPlan:
    """How one layer is cut."""

    name: str
    shape: tuple[int, int]
    """Of its weight, (N, K), on all ranks together."""
    cut: str
    """`columns`: each rank has some of the N outputs; `rows`: some of the K inputs."""
    sent: str
    """What tokens are sent as before the layer, if it is column-parallel, or sums after it, if it is row-parallel."""
    reason: str
    """Why the input of a column-parallel layer is not sent as codes; else empty."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is cut. `print(plan)` shows it as a table."""

    ranks: int
    sequence: bool
    """Whether tokens are cut where features are not."""
    layers: tuple[CutPlan, ...]

    def to_json(self) -> str:
        """Return the plan as JSON."""
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"ranks": self.ranks, "sequence": self.sequence, "layers": layers}, indent=1)

    def __str__(self) -> str:
        table = [("layer", "weight", "cut by", "sent as", "why")]
        table += [(x.name, " x ".join(map(str, x.shape)), x.cut, x.sent, x.reason) for x in self.layers]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)) for row in table]
        return "\n".join([*(line.rstrip() for line in lines), f"on {self.ranks} ranks"])


def target_or_reason(layer: nn.Module) -> Target | str:
    """Return the codes that the input of a column-parallel layer is gathered as, or why its values are gathered."""
    if not isinstance(layer, Linear):
        return "the layer runs in BF16"
    recipe, forward = layer.recipe, layer.recipe.fprop.input
    if not recipe.fprop.is_fp8:
        return "fprop runs in BF16"
    if not recipe.wgrad.is_fp8:
        return "wgrad runs in BF16: it reads the values"
    if forward.tile.rows is None:
        return "a scale a tensor needs the maximum of all ranks' tokens"
    if reused_from(recipe, "wgrad", "input") is None:
        return "wgrad reads other codes than fprop: two copies of one byte are as much as BF16"
    if forward.rounding != "nearest":
        return "its codes are drawn at random"
    if layer.keeps_input:
        return "it keeps its input as it is (requantise)"
    return target_of(forward)
