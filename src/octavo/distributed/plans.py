"""Plans of a model over ranks: what is sent for each weight that is sharded, or layer that is split, and why.

They are made before anything is changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from octavo._util.terminal import columns
from octavo.kernels import QuantSpec
from octavo.kernels.quant_spec import spec_of
from octavo.nn.linear import LinearLayer, is_adopted, is_transposed
from octavo.nn.modules import full_name
from octavo.recipes import Recipe
from octavo.tensor import FP8Tensor, local


@dataclass(frozen=True)
class ParameterUse:
    """One occurrence of a parameter in a model."""

    module: nn.Module
    attribute: str
    full_name: str
    """Full name of the parameter at this place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherPlan:
    """Gathering of one parameter."""

    name: str
    """First name in the model."""
    shape: tuple[int, ...]
    sent: str
    """Codes by format and granularity, values by dtype, or looked-up rows."""
    bytes: int
    """Bytes of the gathered parameter, padding included; 0 if it is never gathered."""
    reason: str
    """Reason why an FP8 layer's weight is not sent as codes; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Gathering of all parameters of a sharded model. `print(plan)` shows it as a table."""

    ranks: int
    """Number of ranks that a parameter is sharded over."""
    parameters: tuple[GatherPlan, ...]
    in_high_precision: int = field(repr=False)
    """Bytes of gathering all parameters without FP8."""

    @property
    def bytes(self) -> int:
        """Bytes of gathering all parameters; a rank receives (ranks - 1) / ranks of them."""
        return sum(parameter.bytes for parameter in self.parameters)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        parameters = [asdict(parameter) for parameter in self.parameters]
        return json.dumps({"ranks": self.ranks, "bytes": self.bytes, "parameters": parameters}, indent=1)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "sent as", "MB", "why")]
        for p in self.parameters:
            shape = " x ".join(map(str, p.shape))
            rows.append((p.name, shape, p.sent, f"{p.bytes / 1e6:.2f}", p.reason))
        total = f"{self.bytes / 1e6:.2f} MB per gather on {self.ranks} ranks"
        return "\n".join([*columns(rows), f"{total}, {self.in_high_precision / 1e6:.2f} without FP8"])


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
    """Why the input of a column-parallel layer is not sent as codes, or why a row-parallel layer is rotated by smaller
    blocks than on one rank; else empty."""


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


def uses_of(model: nn.Module) -> list[tuple[nn.Parameter, list[ParameterUse]]]:
    """Return every parameter of a model with the modules that use it, in the model's order."""
    found: dict[nn.Parameter, list[ParameterUse]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(ParameterUse(module, attribute, full_name(name, attribute)))
    return list(found.items())


def weight_codes_or_reason(
    parameter: Tensor, uses: Sequence[ParameterUse], ranks: int, *, gather_int8: bool = False
) -> QuantSpec | str | None:
    """Return the codes that a weight is sent as, or the reason why its values are; None outside of FP8 layers.

    Args:
        gather_int8: send INT8 codes also where dgrad reads others: layers then read decoded values.
    """
    if not any(isinstance(use.module, LinearLayer) and use.attribute == "weight" for use in uses):
        return None
    others = [use.full_name for use in uses if not (is_adopted(use.module) and use.attribute == "weight")]
    if others:
        return f"shared with {others[0]}, which reads its values"
    if any(is_transposed(use.module) for use in uses):
        return "stored as (K, N): its scales are of columns, of which each rank has a part"
    parameter = local(parameter)  # under tensor parallel, this rank's part
    if isinstance(parameter, FP8Tensor):
        return QuantSpec(parameter.format, parameter.granularity.name, parameter.scaling)
    recipes = [use.module.recipe for use in uses if isinstance(use.module, LinearLayer)]
    reason = next(filter(None, (_unfit(recipe, gather_int8) for recipe in recipes)), None)
    if reason is not None:
        return reason
    targets = {spec_of(recipe.fprop.weight) for recipe in recipes}
    if len(targets) > 1:
        return "layers that share it quantise it differently"
    target = targets.pop()
    height, rows = target.tile.rows, -(-parameter.shape[0] // ranks)
    if height is not None and (rows % height or parameter.shape[0] % height):
        return f"{height} rows share a scale, and a rank has {rows} of {parameter.shape[0]}"
    return target


def _unfit(recipe: Recipe, gather_int8: bool) -> str | None:
    for name in ("fprop", "dgrad"):
        if not recipe.gemm(name).is_fp8:
            return f"{name} runs in BF16"
    if recipe.fprop.weight.rounding != "nearest":
        return "its rounding is stochastic: each forward has new codes"
    is_decoded = gather_int8 and (recipe.fprop.weight.format, recipe.fprop.weight.granularity) == ("int8", "row")
    if not recipe.reuses("dgrad.weight") and not is_decoded:
        return "fprop and dgrad read different codes: two one-byte copies are as large as BF16"
    return None


def gather_plan(
    parameter: Tensor, name: str, sent: QuantSpec | str | None, dtype: torch.dtype | None, ranks: int
) -> GatherPlan:
    """Return the plan of one parameter. `dtype`: that of values when sent; `sent`: None outside of FP8 layers."""
    parameter = local(parameter)
    rows = -(-parameter.shape[0] // ranks) if parameter.dim() else 1
    shape = (rows, *parameter.shape[1:])
    if isinstance(sent, QuantSpec):
        assert len(shape) == 2
        scales = prod(sent.tile.scale_shape(*shape)) if sent.tile.rows is not None else 0
        size = prod(shape) * sent.fmt.dtype.itemsize + scales * torch.float32.itemsize
        text, reason = f"{sent.format} {sent.granularity}", ""
    else:
        dtype = dtype or parameter.dtype
        size, text, reason = prod(shape) * dtype.itemsize, str(dtype).removeprefix("torch."), sent or ""
    return GatherPlan(name=name, shape=tuple(parameter.shape), sent=text, bytes=ranks * size, reason=reason)


def input_codes_or_reason(layer: nn.Module) -> QuantSpec | str:
    """Return the codes in which the input of a column-parallel layer is gathered, or why its values are gathered."""
    if not isinstance(layer, LinearLayer):
        return "the layer runs in BF16"
    recipe, forward = layer.recipe, layer.recipe.fprop.input
    if not recipe.fprop.is_fp8:
        return "fprop runs in BF16"
    if not recipe.wgrad.is_fp8:
        return "wgrad runs in BF16: it reads the values"
    if forward.tile.rows is None:
        return "a per-tensor scale needs the amax of all ranks' tokens"
    if not recipe.reuses("wgrad.input"):
        return "fprop and wgrad read different codes: two one-byte copies are as large as BF16"
    if forward.rounding != "nearest":
        return "its rounding is stochastic"
    if layer.keeps_input:
        return "it saves its input unquantised (requantise)"
    return spec_of(forward)
